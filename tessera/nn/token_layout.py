"""How a grid of codes becomes the sequence of a transformer: N positions of S tokens each.

A position may hold a square of neighboring tokens (`patch`): attention then runs over a quarter of
the positions or fewer, and attention is most of the cost. In the grid of a video the square lies
within one frame, since the first frame has tokens of its own and frames are given one after the
other. A position may also hold the codes of a residual quantizer, as in SoundStorm (Borsos 2023,
arXiv 2305.09636, section 3.1). In both cases each token is masked, predicted and sampled
individually.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The assignment of the codes of one example to positions of a sequence."""

    grid: tuple[int, ...]
    """The sides of the grid of codes: (h, w) of an image, (t,) of audio, (t, h, w) of a video."""
    num_quantizers: int = 1
    """Number of codes in each cell of the grid."""
    patch: int = 1
    """The side of the square of cells that one position holds."""

    def __post_init__(self) -> None:
        if self.patch < 1:
            raise ValueError(
                f"patch is {self.patch}, but a position holds at least 1 x 1 cells: use 1 or more."
            )
        if any(side % patch for side, patch in zip(self.grid, self.patch_sides)):
            shape = " x ".join(map(str, self.grid))
            raise ValueError(
                f"A grid of {shape} tokens cannot be divided into patches of"
                f" {self.patch} x {self.patch}: use a patch that divides every side."
            )

    def with_max_positions(self, max_positions: int | None) -> Layout:
        """Double the patch until there are at most `max_positions`, or until it no longer divides
        the grid."""
        layout = self
        while (
            max_positions is not None
            and layout.num_positions > max_positions
            and not any(
                side % (2 * patch) for side, patch in zip(self.grid[-2:], layout.patch_sides[-2:])
            )
        ):
            layout = replace(layout, patch=2 * layout.patch)
        return layout

    @property
    def patch_sides(self) -> tuple[int, ...]:
        """The number of cells of a position along each axis: 1 along time before two others."""
        spatial = min(2, len(self.grid))
        return (1,) * (len(self.grid) - spatial) + (self.patch,) * spatial

    @property
    def position_grid(self) -> tuple[int, ...]:
        """The sides of the grid of positions."""
        return tuple(side // patch for side, patch in zip(self.grid, self.patch_sides))

    @property
    def num_positions(self) -> int:
        return math.prod(self.position_grid)

    @property
    def tokens_per_position(self) -> int:
        return math.prod(self.patch_sides) * self.num_quantizers

    def for_length(self, length: int) -> Layout:
        """Return the layout of a sequence of another length; other grids do not change."""
        return replace(self, grid=(length,)) if len(self.grid) == 1 else self

    def patchify(self, codes: Tensor) -> Tensor:
        """Rearrange codes (B, *grid) or (B, *grid, num_quantizers) to tokens (B, N, S)."""
        axes = len(self.grid)
        if (
            codes.shape[1 : 1 + axes] != self.grid
            or codes[0].numel() != math.prod(self.grid) * self.num_quantizers
        ):
            raise ValueError(
                f"Codes of shape {tuple(codes.shape[1:])} do not match a grid of {self.grid} with"
                f" {self.num_quantizers} code(s) per cell: encode with the tokenizer that the model"
                " was built for."
            )
        pairs = zip(self.position_grid, self.patch_sides)
        sides = [part for pair in pairs for part in pair]
        cells = codes.reshape(len(codes), *sides, self.num_quantizers)
        outer = [1 + 2 * axis for axis in range(axes)]
        inner = [2 + 2 * axis for axis in range(axes)]
        tokens = cells.permute(0, *outer, *inner, 1 + 2 * axes)
        return tokens.reshape(len(codes), self.num_positions, self.tokens_per_position)

    def unpatchify(self, tokens_BNS: Tensor) -> Tensor:
        """Rearrange tokens to codes (B, *grid) or (B, *grid, num_quantizers)."""
        axes, count = len(self.grid), len(tokens_BNS)
        cells = tokens_BNS.reshape(
            count, *self.position_grid, *self.patch_sides, self.num_quantizers
        )
        order = [index for axis in range(axes) for index in (1 + axis, 1 + axes + axis)]
        codes = cells.permute(0, *order, 1 + 2 * axes)
        codes = codes.reshape(count, *self.grid, self.num_quantizers)
        return codes[..., 0] if self.num_quantizers == 1 else codes

    def cell_coordinates(self) -> Tensor:
        """Return the coordinates (N, S, axes) of every token's cell."""
        axes = len(self.grid)
        coordinates = torch.cartesian_prod(*(torch.arange(side) for side in self.grid))
        coordinates = coordinates.reshape(*self.grid, 1, axes)
        coordinates = coordinates.expand(*self.grid, self.num_quantizers, axes)
        return torch.stack(
            [self.patchify(coordinates[None, ..., axis])[0] for axis in range(axes)], dim=-1
        )

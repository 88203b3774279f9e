"""How a grid of codes becomes the places of a transformer: N places that hold S symbols each.

A place may hold a square of neighbours (`patch`): attention then runs over a quarter of the places
or fewer, which is most of the cost. It may hold the levels of a residual quantizer, as in
SoundStorm (Borsos 2023, arXiv 2305.09636, section 3.1). Either way a symbol is hidden, guessed and
drawn by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    grid: tuple[int, ...]
    """The sides of the grid of codes: (h, w) of a picture, (t,) of a sound."""
    levels: int = 1
    """Symbols that the tokenizer writes for each cell of the grid."""
    patch: int = 1
    """The side of the square of cells that one place holds."""

    def __post_init__(self) -> None:
        if self.patch < 1:
            raise ValueError(
                f"A place holds a square of at least 1 x 1 cells, but the patch is {self.patch}."
            )
        if any(side % self.patch for side in self.grid):
            shape = " x ".join(map(str, self.grid))
            raise ValueError(
                f"A grid of {shape} symbols cannot be cut into patches of {self.patch} x {self.patch}."
            )

    def with_max_positions(self, most: int | None) -> Layout:
        """With patches that are doubled until there are no more places than so many, or until they
        cannot be."""
        layout = self
        while (
            most is not None
            and layout.count > most
            and not any(side % (2 * layout.patch) for side in self.grid)
        ):
            layout = replace(layout, patch=2 * layout.patch)
        return layout

    @property
    def places(self) -> tuple[int, ...]:
        """The sides of the grid of places."""
        return tuple(side // self.patch for side in self.grid)

    @property
    def count(self) -> int:
        return math.prod(self.places)

    @property
    def slots(self) -> int:
        """Symbols in one place."""
        return self.patch ** len(self.grid) * self.levels

    def patchify(self, codes: Tensor) -> Tensor:
        """(B, *grid) or (B, *grid, levels) -> (B, N, S)."""
        axes = len(self.grid)
        if (
            codes.shape[1 : 1 + axes] != self.grid
            or codes[0].numel() != math.prod(self.grid) * self.levels
        ):
            met = tuple(codes.shape[1:])
            raise ValueError(
                f"Codes of shape {met} do not lie on a grid of {self.grid} with {self.levels} level(s)."
            )
        cut = codes.reshape(
            len(codes), *(part for side in self.places for part in (side, self.patch)), self.levels
        )
        outer, inner = (
            [1 + 2 * axis for axis in range(axes)],
            [2 + 2 * axis for axis in range(axes)],
        )
        return cut.permute(0, *outer, *inner, 1 + 2 * axes).reshape(
            len(codes), self.count, self.slots
        )

    def unpatchify(self, tokens_BNS: Tensor) -> Tensor:
        """Back to the shape in which the tokenizer wrote them."""
        axes = len(self.grid)
        cut = tokens_BNS.reshape(len(tokens_BNS), *self.places, *[self.patch] * axes, self.levels)
        order = [number for axis in range(axes) for number in (1 + axis, 1 + axes + axis)]
        codes = cut.permute(0, *order, 1 + 2 * axes).reshape(
            len(tokens_BNS), *self.grid, self.levels
        )
        return codes[..., 0] if self.levels == 1 else codes

    def cells(self) -> Tensor:
        """The coordinates of every symbol's cell, (N, S, axes)."""
        sides = torch.cartesian_prod(*(torch.arange(side) for side in self.grid)).reshape(
            *self.grid, 1, len(self.grid)
        )
        spread = sides.expand(*self.grid, self.levels, len(self.grid))
        return torch.stack(
            [self.patchify(spread[None, ..., axis])[0] for axis in range(len(self.grid))], dim=-1
        )

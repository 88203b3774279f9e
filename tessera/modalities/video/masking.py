"""Masking of videos for several tasks at once (MAGVIT, Yu 2022, arXiv 2212.05199, section 3.3).

For each example a task is drawn, which divides its tokens into given and generated ones:

- generation: nothing is given but the caption, if there is one;
- prediction: the first latent frames are given;
- interpolation: the first and the last latent frame are given;
- inpainting: a box, in all frames, is generated;
- outpainting: everything around a box is generated.

Tokens to predict are drawn among the generated ones as usual. MAGVIT's COMMIT masking also shows
tokens of a condition that are only nearly right, and predicts them: `given_noise` replaces given
tokens by random ones, which are predicted too.

Everything is drawn from shapes and the generator of the example, never from the tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tessera.nn.token_layout import Layout
from tessera.objectives.masking import MaskingConfig

VideoTask = Literal["generation", "prediction", "interpolation", "inpainting", "outpainting"]


@dataclass(frozen=True, kw_only=True)
class VideoMaskingConfig(MaskingConfig):
    """Mask random tokens of the part of a video that a random task generates."""

    prediction: float = 0.3
    """The fraction of the examples of which the first frames are given."""
    interpolation: float = 0.05
    """The fraction of the examples of which the first and the last frame are given."""
    inpainting: float = 0.05
    """The fraction of the examples of which only a box is generated."""
    outpainting: float = 0.05
    """The fraction of the examples of which only a box is given."""
    given_noise: float = 0.0
    """The fraction of given tokens that are replaced by a random token and predicted too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = [self.prediction, self.interpolation, self.inpainting, self.outpainting]
        if min(shares) < 0 or sum(shares) > 1:
            raise ValueError(
                "The fractions of prediction, interpolation, inpainting and outpainting must be at "
                f"least 0 and at most 1 together, got {', '.join(f'{one:g}' for one in shares)}."
            )
        if not 0 <= self.given_noise < 1:
            raise ValueError(
                f"given_noise must be at least 0 and below 1, got {self.given_noise:g}."
            )

    def probabilities(self, layout: Layout) -> dict[VideoTask, float]:
        """Return the probability of each task; a grid of one frame has nothing to predict."""
        frames = layout.grid[0]
        chosen: dict[VideoTask, float] = {
            "prediction": self.prediction if frames > 1 else 0.0,
            "interpolation": self.interpolation if frames > 2 else 0.0,
            "inpainting": self.inpainting,
            "outpainting": self.outpainting,
        }
        return {"generation": 1 - sum(chosen.values()), **chosen}

    def draw_region(self, layout: Layout, generator: torch.Generator) -> Tensor:
        """Draw a task and return which tokens it generates, (N, S).

        The number of random draws does not depend on the task.
        """
        u_task, *u = torch.rand(6, generator=generator).tolist()
        tasks = self.probabilities(layout)
        bounds = itertools.accumulate(tasks.values())
        chosen = (task for task, bound in zip(tasks, bounds) if u_task < bound)
        return build_region(next(chosen, "generation"), layout, u)

    def expected_num_masked(self, layout: Layout) -> float:
        """Return the mean number of predicted tokens of an example."""
        frames, height, width = layout.grid
        box = mean_side(height) * mean_side(width) / (height * width)
        fractions: dict[VideoTask, float] = {
            "generation": 1.0,
            "prediction": 0.5,  # from 1 to frames - 1 of them are given, all equally likely
            "interpolation": (frames - 2) / frames,
            "inpainting": box,
            "outpainting": 1 - box,
        }
        generated = sum(
            probability * fractions[task]
            for task, probability in self.probabilities(layout).items()
        )
        count = layout.num_positions * layout.tokens_per_position
        noisy = self.given_noise * (1 - generated) * count
        return super().expected_num_masked(layout) * generated + noisy


def build_region(task: VideoTask, layout: Layout, u: list[float]) -> Tensor:
    """Return which tokens a task generates, (N, S), from five uniform numbers."""
    time_NS, row_NS, column_NS = layout.cell_coordinates().unbind(-1)
    frames, height, width = layout.grid
    if task == "prediction":
        return time_NS >= 1 + int(u[0] * (frames - 1))
    if task == "interpolation":
        return (time_NS > 0) & (time_NS < frames - 1)
    if task in ("inpainting", "outpainting"):
        top, bottom = draw_side(height, u[1], u[2])
        left, right = draw_side(width, u[3], u[4])
        inside = (row_NS >= top) & (row_NS < bottom) & (column_NS >= left) & (column_NS < right)
        return inside if task == "inpainting" else ~inside
    return torch.ones_like(time_NS, dtype=torch.bool)


def side_lengths(side: int) -> range:
    """Return the possible sides of a box: from a quarter to three quarters of the grid."""
    return range(max(1, side // 4), max(2, side * 3 // 4 + 1))


def mean_side(side: int) -> float:
    lengths = side_lengths(side)
    return sum(lengths) / len(lengths)


def draw_side(side: int, u_length: float, u_start: float) -> tuple[int, int]:
    lengths = side_lengths(side)
    length = lengths[int(u_length * len(lengths))]
    start = int(u_start * (side - length + 1))
    return start, start + length

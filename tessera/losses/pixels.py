"""Pixel losses: means over all elements, computed in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.nn.precision import to_fp32

SATURATED = 0.98
"""Targets beyond plus or minus this value count as white or black: the last three of 256 levels."""


def clip_overshoot(output: Tensor, target: Tensor) -> Tensor:
    """Clip what exceeds a white or black target, so that it is no error and has no gradient.

    Images are clamped to [-1, 1] when they are written. A loss on the values before that keeps
    half of the pixels of a white or black area inside of the range, where they remain visible as
    noise; with this they can lie outside of it.
    """
    infinity = torch.full_like(target, torch.inf)
    lower = torch.where(target <= -SATURATED, target, -infinity)
    upper = torch.where(target >= SATURATED, target, infinity)
    return torch.clamp(output, lower, upper)


def l1(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean absolute error."""
    return F.l1_loss(*_check_shapes(a, b))


def l2(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(*_check_shapes(a, b))


def _check_shapes(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.shape != b.shape:
        raise ValueError(
            f"Got images of shapes {tuple(a.shape)} and {tuple(b.shape)}: they must be equal, "
            "because broadcasting would compare one with many. Resize or repeat them first."
        )
    return to_fp32(a), to_fp32(b)

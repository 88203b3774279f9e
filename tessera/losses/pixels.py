"""Pixel losses: means over all elements, computed in float32 or float64."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from tessera.nn.precision import to_fp32


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

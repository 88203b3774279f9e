"""How far apart two images are, pixel by pixel: scalars, the mean over everything, in float32 or
better."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from tessera.losses import to_fp32


def l1(a: Tensor, b: Tensor) -> Tensor:
    return F.l1_loss(*_comparable(a, b))


def l2(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(*_comparable(a, b))


def _comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.shape != b.shape:
        raise ValueError(
            f"Shapes {tuple(a.shape)} and {tuple(b.shape)} are compared pixel by pixel: they must be equal, because "
            "broadcasting would compare each with many."
        )
    return to_fp32(a), to_fp32(b)

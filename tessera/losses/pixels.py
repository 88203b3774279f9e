"""How far apart two images are, pixel by pixel: scalars, the mean over everything, in float32 or better."""

from __future__ import annotations

from torch import Tensor

from tessera.losses import full


def l1(a: Tensor, b: Tensor) -> Tensor:
    return _difference(a, b).abs().mean()


def l2(a: Tensor, b: Tensor) -> Tensor:
    return _difference(a, b).square().mean()


def _difference(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        raise ValueError(
            f"Shapes {tuple(a.shape)} and {tuple(b.shape)} are compared pixel by pixel: they must be equal, because "
            "broadcasting would compare each with many."
        )
    return full(a) - full(b)

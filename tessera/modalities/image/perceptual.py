"""Losses, metrics and alarms that images and videos share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tessera.engine.task import Alarm, BestMetric, Frozen
from tessera.losses.perceptual import perceptual_distance_B
from tessera.modalities.image.efficientnet_lite import EfficientNetLite
from tessera.modalities.image.vgg import VGG16

PSNR = BestMetric(name="psnr")


@dataclass(frozen=True, kw_only=True)
class PerceptualConfig:
    weight: float = 1.0
    """The weight of the perceptual loss."""
    vgg: str | None = None
    """A VGG16 file with torchvision's names (.safetensors or .pth); None uses EfficientNet-Lite0
    of tessera[perceptual]."""

    def build(self) -> nn.Module:
        """Load the feature network."""
        return VGG16.load(self.vgg) if self.vgg is not None else EfficientNetLite.load()


def perceptual_loss_B(network: Frozen, output: Tensor, target: Tensor) -> Tensor:
    """Return the distance of pretrained features; only the output gets gradients."""
    with torch.no_grad():
        target_features = network.network.features(target)
    return perceptual_distance_B(network.network.features(output), target_features)


def contrast_metric(output: Tensor, target: Tensor) -> dict[str, Callable[[], Tensor]]:
    return {"contrast": partial(relative_contrast, output, target)}


@torch.no_grad()
def relative_contrast(output: Tensor, target: Tensor) -> Tensor:
    """Return the contrast of reconstructions relative to originals, near 0 if they are flat.

    It uses every 16th pixel to be cheap.
    """
    pair = torch.stack([output[..., ::4, ::4], target[..., ::4, ::4]])
    output_B, target_B = pair.float().flatten(2).std(-1, correction=0)
    return (output_B / target_B.clamp_min(1e-3)).mean()


ALARMS = (
    Alarm(
        name="flat output",
        metric="model/contrast",
        below=0.1,
        patience=5,
        after=100,
        hint="The reconstructions have almost no contrast. Lower the learning rate, or start the "
        "discriminator later.",
    ),
    Alarm(
        name="EMA lags",
        metric="val_ema/psnr",
        below=5.0,
        patience=3,
        after=500,
        hint="The EMA weights reconstruct poorly. Lower --ema.decay for a short run.",
    ),
)

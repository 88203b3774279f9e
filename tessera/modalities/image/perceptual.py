"""What pictures and clips have in common when they are rebuilt: signs of health, and the distance a
pretrained network sees."""

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

PSNR = BestMetric(metric="psnr")


@dataclass(frozen=True, kw_only=True)
class PerceptualConfig:
    weight: float = 1.0
    """Strength of the perceptual term in the loss."""
    vgg: str | None = None
    """A VGG16 file (torchvision's names; .safetensors or .pth). None: EfficientNet-Lite0 from
    tessera[perceptual]."""

    def build(self) -> nn.Module:
        return VGG16.load(self.vgg) if self.vgg is not None else EfficientNetLite.load()


def perceptual_difference_B(network: Frozen, output: Tensor, target: Tensor) -> Tensor:
    """How differently a pretrained network sees pictures and their originals; gradients go to the
    pictures only."""
    with torch.no_grad():
        wanted = network.network.features(target)
    return perceptual_distance_B(network.network.features(output), wanted)


def train_metrics(output: Tensor, target: Tensor) -> dict[str, Callable[[], Tensor]]:
    return {"contrast": partial(contrast, output, target)}


@torch.no_grad()
def contrast(output: Tensor, target: Tensor) -> Tensor:
    """A cheap sign of health: the spread of every 16th pixel of a reconstruction against that of
    its original, near 0 if it is flat."""
    made_B, real_B = (
        torch.stack([output[..., ::4, ::4], target[..., ::4, ::4]])
        .float()
        .flatten(2)
        .std(-1, correction=0)
    )
    return (made_B / real_B.clamp_min(1e-3)).mean()


ALARMS = (
    Alarm(
        name="flat output",
        metric="model/contrast",
        below=0.1,
        patience=5,
        after=100,
        hint="The reconstructions have almost no contrast. Lower the learning rate, or start the discriminator later.",
    ),
    Alarm(
        name="the average lags",
        metric="val_ema/psnr",
        below=5.0,
        patience=3,
        after=500,
        hint="The averaged model is far from the originals. Lower the average's decay for so short a run.",
    ),
)

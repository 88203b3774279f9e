"""Losses, metrics and alarms that images and videos share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.engine.task import Alarm, Batch, BestMetric, Frozen
from tessera.losses.perceptual import perceptual_distance_B
from tessera.modalities.image.efficientnet_lite import EfficientNetLite
from tessera.modalities.image.vgg import VGG16

PSNR = BestMetric(name="psnr")


@dataclass(frozen=True, kw_only=True)
class PerceptualConfig:
    weight: float = 1.0
    """The weight of the perceptual loss."""
    fraction: float = 1.0
    """The fraction of the examples, drawn at each step, on which the loss is computed. The others
    cost nothing, and the expectation of the loss is the same."""
    vgg: str | None = None
    """A VGG16 file with torchvision's names (.safetensors or .pth); None uses EfficientNet-Lite0
    of tessera[perceptual]."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"The fraction of examples with a perceptual loss is {self.fraction}, but it must "
                "be above 0 and at most 1: disable the loss with --perceptual off."
            )

    def build(self) -> nn.Module:
        """Load the feature network."""
        return VGG16.load(self.vgg) if self.vgg is not None else EfficientNetLite.load()


def perceptual_loss_B(network: Frozen, output: Tensor, target: Tensor) -> Tensor:
    """Return the distance of pretrained features; only the output gets gradients."""
    with torch.no_grad():
        target_features = network.network.features(target)
    return perceptual_distance_B(network.network.features(output), target_features)


def perceptual_term(
    network: Frozen, config: PerceptualConfig, output: Tensor, target: Tensor, batch: Batch
) -> Tensor:
    """Return the weighted loss of a batch, computed on a random fraction of its examples.

    Each example is drawn by its own generator, so that neither the size of micro-batches nor the
    number of processes changes which examples are drawn.
    """
    if config.fraction == 1:
        return config.weight * perceptual_loss_B(network, output, target).mean()
    u_B = [torch.rand((), generator=generator).item() for generator in batch.generators()]
    drawn = [index for index, u in enumerate(u_B) if u < config.fraction]
    if not drawn:
        return output.new_zeros(())
    distance_B = perceptual_loss_B(network, output[drawn], target[drawn])
    return config.weight / (config.fraction * len(batch)) * distance_B.sum()


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
    Alarm(
        name="pale colours",
        metric="val_ema/chroma",
        below=0.7,
        patience=2,
        after=500,
        hint="The reconstructions are much paler than the originals. Raise "
        "--task.reconstruction.chroma-weight, use a larger codebook "
        "(--task.model.quantizer.levels), or train longer.",
    ),
)

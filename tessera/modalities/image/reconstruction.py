"""What the tokenizer task has to know of pictures: what a good reconstruction is, who judges it,
which networks there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.engine.task import Batch, Frozen
from tessera.losses.pixels import l1, l2
from tessera.metrics.image import SSIM_WINDOW, frechet, moments, psnr_B, ssim_B
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.efficientnet_lite import EfficientNetLite
from tessera.modalities.image.media import Image
from tessera.modalities.image.perceptual import (
    ALARMS,
    PSNR,
    PerceptualConfig,
    perceptual_difference_B,
    train_metrics,
)
from tessera.modalities.image.vqgan import VQGANConfig
from tessera.objectives.reconstruction import (
    AdversaryConfig,
    Discriminator,
    ReconstructionLoss,
    TokenizerConfig,
)


@dataclass(frozen=True, kw_only=True)
class ImageReconstructionConfig:
    pixel: Literal["l1", "l2"] = "l1"
    """Mean absolute or mean squared difference of the pixels."""
    perceptual: PerceptualConfig | None = None
    """A term on the features of a pretrained network; none leaves it out."""
    measure_features: bool = False
    """Validation also tells perceptual and Frechet distances on EfficientNet-Lite0's features."""

    def validate_data(self, data: Any) -> None:
        if data.size < SSIM_WINDOW:
            raise ValueError(
                f"Pictures of {data.size} x {data.size} are too small to be measured: SSIM looks through windows of "
                f"{SSIM_WINDOW} x {SSIM_WINDOW}. Use {SSIM_WINDOW + 1} or more."
            )

    def notice(self) -> str:
        return "" if self.perceptual is not None else "The perceptual term is off."

    def for_inference(self) -> ImageReconstructionConfig:
        """Without networks that only training and measuring need."""
        return replace(self, perceptual=None, measure_features=False)

    def build(self) -> ImageReconstructionLoss:
        return ImageReconstructionLoss(self)


class ImageReconstructionLoss(ReconstructionLoss):
    """Pictures are (B, 3, H, W) in [-1, 1]."""

    best_metric, alarms = PSNR, ALARMS

    def __init__(self, config: ImageReconstructionConfig):
        super().__init__()
        self.config = config
        self.features = Frozen(config.perceptual.build()) if config.perceptual is not None else None
        self.judge = self._judge() if config.measure_features else None

    def _judge(self) -> Frozen:
        """One network serves loss and measure where it can."""
        if self.features is not None and isinstance(self.features.network, EfficientNetLite):
            return self.features
        return Frozen(EfficientNetLite.load())

    def target(self, examples: Any) -> Tensor:
        return examples.pixels

    def preprocess(self, target: Tensor, data: Any, dtype: torch.dtype) -> Tensor:
        """Pictures in the size that these data have: larger ones are reduced by whole squares of
        pixels."""
        target = target.to(dtype)
        if target.shape[-1] == data.size:
            return target
        if target.shape[-1] % data.size:
            side = target.shape[-1]
            raise ValueError(
                f"Pictures of {side} pixels cannot be reduced to {data.size} by whole squares of pixels."
            )
        return F.avg_pool2d(target, target.shape[-1] // data.size)

    def media(self, output: Tensor) -> list[Image]:
        return [Image.from_floats(picture) for picture in output.float().cpu().numpy()]

    def terms(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        target = self.target(batch.examples)
        pixel = l1 if self.config.pixel == "l1" else l2
        terms = {"pixel": pixel(output, target)}
        if self.features is not None and self.config.perceptual is not None:
            distance = perceptual_difference_B(self.features, output, target).mean()
            terms["perceptual"] = self.config.perceptual.weight * distance
        return terms

    def train_metrics(self, output: Tensor, batch: Batch) -> dict[str, Callable[[], Tensor]]:
        return train_metrics(output, self.target(batch.examples))

    def eval_step(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        target = self.target(batch.examples)
        pixel = (output - target).abs() if self.config.pixel == "l1" else (output - target).square()
        seen = {
            "pixel": pixel.flatten(1).mean(1).double().sum(),
            "psnr": psnr_B(output, target).double().sum(),
            "ssim": ssim_B(output, target).double().sum(),
        }
        if self.judge is not None:
            seen["perceptual"] = perceptual_difference_B(self.judge, output, target).double().sum()
            for name, pictures in (("rebuilt", output), ("real", target)):
                embedded = self.judge.network.embed(pictures)
                seen |= {f"{name}/{key}": value for key, value in moments(embedded).items()}
        return seen

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        means = ("psnr", "ssim", "pixel", *(("perceptual",) if self.judge is not None else ()))
        numbers = {name: float(totals[name] / totals["examples"]) for name in means}
        if self.judge is not None and totals["examples"] > 1:  # one example has no spread
            numbers["frechet_lite0"] = frechet(
                _moments_of(totals, "real"), _moments_of(totals, "rebuilt")
            )
        return numbers

    def shown(self, output: Tensor, batch: Batch) -> list[Image]:
        """Each original beside its reconstruction."""
        pairs = zip(self.media(self.target(batch.examples)), self.media(output), strict=True)
        return [Image.beside(real, rebuilt) for real, rebuilt in pairs]


def _moments_of(totals: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{name}/"): value
        for key, value in totals.items()
        if key.startswith(f"{name}/")
    }


@dataclass(frozen=True, kw_only=True)
class ImageAdversaryConfig(AdversaryConfig):
    discriminator: PatchDiscriminatorConfig = field(default_factory=PatchDiscriminatorConfig)

    def discriminators(self) -> dict[str, Discriminator]:
        return {"discriminator": Discriminator(self.discriminator.build(), whole)}


def whole(pictures: Tensor, batch: Batch) -> Tensor:
    return pictures


@dataclass(frozen=True, kw_only=True)
class ImageTokenizerConfig(TokenizerConfig):
    model: VQGANConfig = field(default_factory=VQGANConfig)
    reconstruction: ImageReconstructionConfig = field(default_factory=ImageReconstructionConfig)
    adversary: ImageAdversaryConfig | None = None
    """A discriminator that learns to tell reconstructions from originals; none leaves nothing of it
    behind."""

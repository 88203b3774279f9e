"""Reconstruction of images: adapter, loss, metrics and discriminator of the tokenizer objective.

Images are (B, C, H, W) in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.engine.task import Batch, Frozen
from tessera.losses.pixels import clip_overshoot, l1, l2
from tessera.metrics.image import (
    SSIM_WINDOW,
    chroma_B,
    chroma_error_B,
    colour_differences,
    frechet_distance,
    moments,
    psnr_B,
    relative_chroma,
    relative_contrast,
    ssim_B,
)
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.efficientnet_lite import EfficientNetLite
from tessera.modalities.image.media import Image, ImageBatch
from tessera.modalities.image.perceptual import (
    ALARMS,
    PSNR,
    PerceptualConfig,
    perceptual_loss_B,
    perceptual_term,
)
from tessera.modalities.image.vqgan import VQGANConfig
from tessera.nn.pretrained import MIN_PIXELS
from tessera.objectives.reconstruction import (
    AdversaryConfig,
    Discriminator,
    MediaAdapter,
    ReconstructionConfig,
    ReconstructionLoss,
    TokenizerConfig,
)

if TYPE_CHECKING:
    from tessera.modalities.image.dataset import ImageDataConfig


class ImageAdapter(MediaAdapter):
    def target(self, examples: ImageBatch) -> Tensor:
        return examples.pixels

    def preprocess(self, target: Tensor, data: ImageDataConfig, dtype: torch.dtype) -> Tensor:
        """Reduce larger images by average pooling to the size of the data."""
        target, sides = target.to(dtype), tuple(target.shape[-2:])
        if sides == data.shape:
            return target
        factor = sides[0] // data.shape[0]
        if sides != tuple(factor * side for side in data.shape):
            raise ValueError(
                f"Images of {format_shape(sides)} pixels cannot be reduced to "
                f"{format_shape(data.shape)} by a whole factor: use a --low-res-tokenizer whose "
                f"image size divides {min(sides)}."
            )
        return F.avg_pool2d(target, factor)

    def bound(self, output: Tensor) -> Tensor:
        return output.clamp(-1, 1)

    def to_media(self, output: Tensor) -> list[Image]:
        return [Image.from_floats(image) for image in output.float().cpu().numpy()]

    def show_pairs(self, output: Tensor, batch: Batch[ImageBatch]) -> list[Image]:
        originals = self.to_media(batch.examples.pixels)
        pairs = zip(originals, self.to_media(output), strict=True)
        return [Image.side_by_side(original, made) for original, made in pairs]


def format_shape(shape: tuple[int, ...]) -> str:
    """Return the side of a square, or width x height."""
    height, width = shape
    return f"{width}" if width == height else f"{width} x {height}"


@dataclass(frozen=True, kw_only=True)
class ImageReconstructionConfig(ReconstructionConfig):
    pixel: Literal["l1", "l2"] = "l1"
    """The pixel loss: mean absolute or mean squared difference."""
    chroma_weight: float = 0.0
    """The weight of the squared error of the two colour differences, on top of the pixel loss; 0
    disables it, and grey images have none."""
    perceptual: PerceptualConfig | None = None
    """A loss on the features of a pretrained network; None disables it."""
    measure_features: bool = False
    """Report perceptual and Frechet distances of EfficientNet-Lite0 features in validation."""

    def validate_data(self, data: ImageDataConfig) -> None:
        if data.size < MIN_PIXELS and (self.perceptual is not None or self.measure_features):
            raise ValueError(
                f"The image size is {data.size}, but the perceptual loss and metrics need "
                f"{MIN_PIXELS} pixels: use --data.size {MIN_PIXELS} or more, or --perceptual off."
            )

    def fit_data(self, data: ImageDataConfig) -> Self:
        return replace(self, measure_features=self.measure_features and data.size >= MIN_PIXELS)

    def notice(self, data: ImageDataConfig) -> str:
        notices = [] if self.perceptual is not None else ["The perceptual loss is disabled."]
        names = [
            name
            for name, pixels in (("SSIM", SSIM_WINDOW), ("perceptual and Frechet", MIN_PIXELS))
            if data.size < pixels
        ]
        if names:
            notices.append(
                f"Images of {data.size} pixels are too small for the {' and '.join(names)} metrics."
            )
        return " ".join(notices)

    def for_inference(self) -> Self:
        return replace(self, perceptual=None, measure_features=False)

    def build(self) -> ImageReconstructionLoss:
        return ImageReconstructionLoss(self)


class ImageReconstructionLoss(ReconstructionLoss):
    best_metric, alarms = PSNR, ALARMS

    def __init__(self, config: ImageReconstructionConfig):
        super().__init__()
        self.config = config
        self.perceptual = (
            Frozen(config.perceptual.build()) if config.perceptual is not None else None
        )
        self.feature_network: Frozen | None = None
        if config.measure_features:  # one network serves loss and metrics where it can
            shared = self.perceptual
            is_shared = shared is not None and isinstance(shared.network, EfficientNetLite)
            self.feature_network = shared if is_shared else Frozen(EfficientNetLite.load())

    def losses(self, output: Tensor, batch: Batch[ImageBatch]) -> dict[str, Tensor]:
        target = batch.examples.pixels
        output = clip_overshoot(output, target)
        pixel = l1 if self.config.pixel == "l1" else l2
        terms = {"pixel": pixel(output, target)}
        if self.config.chroma_weight and target.shape[1] >= 3:
            # Squared, because the mean absolute error of several hues with one code is smallest at
            # their median, and each of the others is drawn away from it no more strongly than by
            # a small error (docs/experiments-images-vqgan.md).
            chroma = l2(colour_differences(output), colour_differences(target))
            terms["chroma"] = self.config.chroma_weight * chroma
        if self.perceptual is not None and self.config.perceptual is not None:
            terms["perceptual"] = perceptual_term(
                self.perceptual, self.config.perceptual, output, target, batch
            )
        return terms

    def train_metrics(
        self, output: Tensor, batch: Batch[ImageBatch]
    ) -> dict[str, Callable[[], Tensor]]:
        return {"contrast": partial(relative_contrast, output, batch.examples.pixels)}

    def eval_step(self, output: Tensor, batch: Batch[ImageBatch]) -> dict[str, Tensor]:
        target = batch.examples.pixels
        output = output.clamp(-1, 1)  # as it is written
        difference = output - target
        pixel = difference.abs() if self.config.pixel == "l1" else difference.square()
        sums = {
            "pixel": pixel.flatten(1).mean(1).double().sum(),
            "psnr": psnr_B(output, target).double().sum(),
        }
        if target.shape[1] >= 3:
            sums |= {
                f"{name}/chroma": chroma_B(images).double().sum()
                for name, images in (("reconstruction", output), ("real", target))
            }
            sums["chroma_error"] = chroma_error_B(output, target).double().sum()
        if min(target.shape[2:]) >= SSIM_WINDOW:
            sums["ssim"] = ssim_B(output, target).double().sum()
        if self.feature_network is not None:
            distance_B = perceptual_loss_B(self.feature_network, output, target)
            sums["perceptual"] = distance_B.double().sum()
            for name, images in (("reconstruction", output), ("real", target)):
                features = self.feature_network.network.embed(images)
                sums |= {f"{name}/{key}": value for key, value in moments(features).items()}
        return sums

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        has_features = self.feature_network is not None
        names = ("psnr", "ssim", "pixel", "perceptual")
        metrics = {n: float(totals[n] / totals["examples"]) for n in names if n in totals}
        metrics |= relative_chroma(totals)
        if has_features and totals["examples"] > 1:  # one example has no covariance
            real, fake = (select_prefix(totals, name) for name in ("real/", "reconstruction/"))
            metrics["frechet_lite0"] = frechet_distance(real, fake)
        return metrics


def select_prefix(totals: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in totals.items() if k.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class ImageAdversaryConfig(AdversaryConfig):
    discriminator: PatchDiscriminatorConfig = field(default_factory=PatchDiscriminatorConfig)

    def fit_data(self, data: ImageDataConfig) -> Self:
        return replace(self, discriminator=replace(self.discriminator, channels=data.channels))

    def discriminators(self) -> dict[str, Discriminator]:
        return {"discriminator": Discriminator(self.discriminator.build(), view_written)}


def view_written(images: Tensor, batch: Batch[ImageBatch]) -> Tensor:
    """Return images as they are written, without what the reconstruction loss permits outside."""
    return images.clamp(-1, 1)


@dataclass(frozen=True, kw_only=True)
class ImageTokenizerConfig(TokenizerConfig):
    model: VQGANConfig = field(default_factory=VQGANConfig)
    reconstruction: ImageReconstructionConfig = field(default_factory=ImageReconstructionConfig)
    adversary: ImageAdversaryConfig | None = None
    """A discriminator that is trained with the tokenizer; None disables it."""

    def build_adapter(self) -> ImageAdapter:
        return ImageAdapter()

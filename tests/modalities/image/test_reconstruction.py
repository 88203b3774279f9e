"""Evaluation metrics of image reconstructions, with the feature network of the optional metrics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.engine.task import Batch
from tessera.metrics.image import frechet_distance, moments
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.media import ImageBatch
from tessera.modalities.image.perceptual import PerceptualConfig
from tessera.modalities.image.reconstruction import (
    ImageAdversaryConfig,
    ImageReconstructionConfig,
    ImageReconstructionLoss,
)


@pytest.fixture(scope="module")
def loss() -> ImageReconstructionLoss:
    return ImageReconstructionConfig(measure_features=True).build().eval()


def random_images(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@torch.no_grad()
def evaluate(
    loss: ImageReconstructionLoss, output: Tensor, target: Tensor, batch_size: int
) -> dict[str, float]:
    """Compute metrics as validation does: sums over batches, then metrics."""
    totals: dict[str, Tensor] = {}
    batches = zip(output.split(batch_size), target.split(batch_size), strict=True)
    for reconstruction, original in batches:
        names = [str(i) for i in range(len(original))]
        batch = Batch(ImageBatch(original, names), names, list(range(len(original))))
        for name, value in loss.eval_step(reconstruction, batch).items():
            totals[name] = totals.get(name, torch.zeros(())) + value
    return loss.compute_metrics(totals | {"examples": torch.tensor(len(target))})


def test_metrics_are_those_of_the_whole_set(loss: ImageReconstructionLoss) -> None:
    target, output = random_images(6), random_images(6, seed=1)
    whole, parts = (evaluate(loss, output, target, batch_size) for batch_size in (6, 4))
    assert whole == pytest.approx(parts, rel=1e-4)
    assert loss.feature_network is not None
    with torch.no_grad():
        real, fake = (
            moments(loss.feature_network.network.embed(images)) for images in (target, output)
        )
    assert whole["frechet_lite0"] == pytest.approx(frechet_distance(real, fake), rel=1e-4)
    assert whole["pixel"] == pytest.approx((output - target).abs().mean().item(), rel=1e-5)


def test_perfect_reconstructions_have_zero_distance(loss: ImageReconstructionLoss) -> None:
    metrics = evaluate(loss, random_images(4), random_images(4), batch_size=4)
    assert metrics["perceptual"] == metrics["pixel"] == 0 and metrics["ssim"] == pytest.approx(1)
    assert metrics["frechet_lite0"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("size", [16, 28])
def test_small_grey_and_transparent_images_have_every_metric(
    loss: ImageReconstructionLoss, channels: int, size: int
) -> None:
    target = random_images(4)[..., :size, :size].repeat(1, 2, 1, 1)[:, :channels]
    metrics = evaluate(loss, -target, target, batch_size=2)
    colour = {"chroma", "chroma_error"} if channels == 4 else set()
    assert metrics.keys() == {"psnr", "ssim", "pixel", "perceptual", "frechet_lite0"} | colour
    assert metrics["perceptual"] > 0


def test_metrics_that_cannot_measure_a_size_are_left_out() -> None:
    data = ImageDataConfig(size=8)
    config = ImageReconstructionConfig(measure_features=True).fit_data(data)
    images = random_images(2)[..., :8, :8]
    config.validate_data(data)
    assert evaluate(config.build(), images, images, batch_size=2).keys() == {
        "psnr",
        "pixel",
        "chroma",
        "chroma_error",
    }
    assert "8 pixels are too small for the SSIM and perceptual" in config.notice(data)
    assert "too small" not in config.notice(ImageDataConfig(size=16))
    with pytest.raises(ValueError, match="use --data.size 16 or more, or --perceptual off"):
        ImageReconstructionConfig(perceptual=PerceptualConfig()).fit_data(data).validate_data(data)


def test_single_image_has_all_metrics_but_the_frechet_distance(
    loss: ImageReconstructionLoss,
) -> None:
    """A small folder may hold out a single image, which has no covariance."""
    metrics = evaluate(loss, random_images(1), random_images(1, seed=1), batch_size=1)
    assert metrics.keys() == {
        "psnr",
        "ssim",
        "pixel",
        "perceptual",
        "chroma",
        "chroma_error",
    }


def test_chroma_is_that_of_reconstructions_relative_to_originals(
    loss: ImageReconstructionLoss,
) -> None:
    target = random_images(4)
    grey = target.mean(1, keepdim=True).expand_as(target)
    half = grey + (target - grey) / 2
    assert evaluate(loss, half, target, batch_size=3)["chroma"] == pytest.approx(0.5, rel=1e-4)
    assert evaluate(loss, grey, target, batch_size=3)["chroma"] == pytest.approx(0, abs=1e-4)
    assert "chroma" not in evaluate(loss, target, grey, batch_size=3)


def test_chroma_error_measures_a_wrong_hue_of_the_same_chroma(
    loss: ImageReconstructionLoss,
) -> None:
    luma = 0.299 * 0.5 + 0.114 * 0.2
    reddish = torch.tensor([0.5, 0.0, 0.2]) - luma  # colour differences without luma
    target, opposite = (one.view(1, 3, 1, 1).expand(4, 3, 32, 32) for one in (reddish, -reddish))
    metrics = evaluate(loss, opposite, target, batch_size=3)
    assert metrics["chroma"] == pytest.approx(1, rel=1e-4)
    assert metrics["chroma_error"] == pytest.approx(2, rel=1e-4)
    assert evaluate(loss, target, target, batch_size=3)["chroma_error"] == 0


def perceptual_terms(fraction: float, seeds: list[int]) -> float:
    config = ImageReconstructionConfig(perceptual=PerceptualConfig(weight=0.5, fraction=fraction))
    target, output = random_images(8)[: len(seeds)], random_images(8, seed=1)[: len(seeds)]
    batch = Batch(ImageBatch(target, []), [str(seed) for seed in seeds], seeds)
    return float(config.build().losses(output, batch)["perceptual"])


def test_perceptual_loss_of_a_fraction_of_examples_has_the_same_expectation() -> None:
    whole = perceptual_terms(1.0, list(range(4)))
    drawn = [perceptual_terms(0.25, [100 * i + j for j in range(4)]) for i in range(60)]
    assert min(drawn) == 0  # a batch of which no example is drawn
    assert sum(drawn) / len(drawn) == pytest.approx(whole, rel=0.25)


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_perceptual_fraction_outside_its_range_is_an_error(fraction: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        PerceptualConfig(fraction=fraction)


def test_chroma_loss_ignores_brightness_and_grey_images() -> None:
    loss = ImageReconstructionConfig(chroma_weight=2.0).build()
    target = random_images(3) * 0.5

    def chroma(output: Tensor, target: Tensor) -> float:
        batch = Batch(ImageBatch(target, []), [""] * len(target), [0] * len(target))
        return float(loss.losses(output, batch)["chroma"])

    assert chroma(target + 0.25, target) == pytest.approx(0, abs=1e-6)
    # A shift of blue by 0.1 changes the differences by 0.1 * 0.886 / 1.772 and 0.1 * 0.114 / 1.402.
    bluer = target + torch.tensor([0.0, 0.0, 0.1])[:, None, None]
    assert chroma(bluer, target) == pytest.approx(0.05**2 + (0.0114 / 1.402) ** 2, rel=1e-3)
    grey = Batch(ImageBatch(target[:, :1], []), [""] * 3, [0] * 3)
    assert "chroma" not in loss.losses(target[:, :1], grey)


def test_values_beyond_white_and_black_are_no_error() -> None:
    loss = ImageReconstructionConfig(chroma_weight=8.0, perceptual=PerceptualConfig()).build()
    target = random_images(2).sign()
    batch = Batch(ImageBatch(target, []), ["", ""], [0, 1])
    terms = loss.losses(1.5 * target, batch)
    assert terms.keys() == {"pixel", "chroma", "perceptual"}
    assert all(float(term) == 0 for term in terms.values())
    assert float(loss.losses(0.5 * target, batch)["pixel"]) == pytest.approx(0.5)


def test_metrics_are_those_of_images_as_they_are_written(loss: ImageReconstructionLoss) -> None:
    target, output = random_images(4), 2 * random_images(4, seed=1)
    assert output.abs().max() > 1
    written = evaluate(loss, output.clamp(-1, 1), target, batch_size=4)
    assert evaluate(loss, output, target, batch_size=4) == written
    batch = Batch(ImageBatch(target.sign(), []), [""] * 4, [0] * 4)
    contrast = loss.train_metrics(3 * target.sign(), batch)["contrast"]
    assert float(contrast()) == pytest.approx(1)


def test_discriminators_get_images_as_they_are_written() -> None:
    (discriminator,) = ImageAdversaryConfig().discriminators().values()
    images = 2 * random_images(2)
    batch = Batch(ImageBatch(images, []), ["", ""], [0, 1])
    assert torch.equal(discriminator.view(images, batch), images.clamp(-1, 1))

"""Evaluation metrics of image reconstructions, with the feature network of the optional metrics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.engine.task import Batch
from tessera.metrics.image import frechet_distance, moments
from tessera.modalities.image.media import ImageBatch
from tessera.modalities.image.reconstruction import (
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


def test_single_image_has_all_metrics_but_the_frechet_distance(
    loss: ImageReconstructionLoss,
) -> None:
    """A small folder may hold out a single image, which has no covariance."""
    metrics = evaluate(loss, random_images(1), random_images(1, seed=1), batch_size=1)
    assert metrics.keys() == {"psnr", "ssim", "pixel", "perceptual"}

"""What validation tells of rebuilt pictures, with the feature network that may be installed."""

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
def measuring() -> ImageReconstructionLoss:
    return ImageReconstructionConfig(measure_features=True).build().eval()


def pictures(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@torch.no_grad()
def told(
    reconstruction: ImageReconstructionLoss, rebuilt: Tensor, real: Tensor, at_once: int
) -> dict[str, float]:
    """As a validation comes to its numbers: batch by batch, summed, concluded."""
    totals: dict[str, Tensor] = {}
    for made, original in zip(rebuilt.split(at_once), real.split(at_once), strict=True):
        names = [str(number) for number in range(len(made))]
        seen = reconstruction.batch_stats(
            made, Batch(ImageBatch(original, names), names, list(range(len(made))))
        )
        totals = {name: totals.get(name, 0) + value for name, value in seen.items()}
    return reconstruction.compute_metrics(totals | {"examples": torch.tensor(len(real))})


def test_the_measures_are_of_the_whole_set_however_it_is_cut(
    measuring: ImageReconstructionLoss,
) -> None:
    real, rebuilt = pictures(6), pictures(6, seed=1)
    whole, parts = (
        told(measuring, rebuilt, real, at_once=6),
        told(measuring, rebuilt, real, at_once=4),
    )
    assert whole == pytest.approx(parts, rel=1e-4)
    with torch.no_grad():
        seen, made = (moments(measuring.judge.network.embed(images)) for images in (real, rebuilt))
    assert whole["frechet_lite0"] == pytest.approx(frechet_distance(seen, made), rel=1e-4)
    assert whole["pixel"] == pytest.approx((rebuilt - real).abs().mean().item(), rel=1e-5)


def test_what_is_rebuilt_perfectly_is_no_distance_away(measuring: ImageReconstructionLoss) -> None:
    numbers = told(measuring, pictures(4), pictures(4), at_once=4)
    assert numbers["perceptual"] == numbers["pixel"] == 0 and numbers["ssim"] == pytest.approx(1)
    assert numbers["frechet_lite0"] == pytest.approx(0, abs=1e-4)


def test_of_a_single_picture_there_is_no_frechet_distance_and_all_else(
    measuring: ImageReconstructionLoss,
) -> None:
    """A folder of sixty may hold out one; its run once ended there, after the last step."""
    assert told(measuring, pictures(1), pictures(1, seed=1), at_once=1).keys() == {
        "psnr",
        "ssim",
        "pixel",
        "perceptual",
    }

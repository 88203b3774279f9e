"""Tests of the image metrics against their formulas, computed with loops or with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tessera.metrics.image import frechet_distance, moments, psnr_B, ssim_B


def ssim_loop(a: np.ndarray, b: np.ndarray) -> float:
    """Compute SSIM of one channel in [-1, 1] window by window (Wang 2004, eq. 13 to 16)."""
    weights = np.array(
        [[math.exp(-(y * y + x * x) / (2 * 1.5**2)) for x in range(-5, 6)] for y in range(-5, 6)]
    )
    weights /= weights.sum()
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    values = []
    for y in range(a.shape[0] - 10):
        for x in range(a.shape[1] - 10):
            window_a, window_b = a[y : y + 11, x : x + 11], b[y : y + 11, x : x + 11]
            mean_a, mean_b = (weights * window_a).sum(), (weights * window_b).sum()
            variance_a = (weights * (window_a - mean_a) ** 2).sum()
            variance_b = (weights * (window_b - mean_b) ** 2).sum()
            covariance = (weights * (window_a - mean_a) * (window_b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + c1)
                * (2 * covariance + c2)
                / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))
            )
    return float(np.mean(values))


def random_images(
    count: int = 2, height: int = 16, width: int = 13, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.rand(count, 3, height, width, dtype=dtype) * 2 - 1


def add_moments(*parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


# ---- PSNR and SSIM


def test_error_of_a_tenth_of_the_range_is_twenty_decibels():
    a = torch.zeros(3, 3, 8, 8)

    torch.testing.assert_close(psnr_B(a, a + 0.2), torch.full((3,), 20.0))


def test_psnr_is_computed_per_example():
    a, b = random_images(4), random_images(4)

    alone = torch.cat([psnr_B(a[i : i + 1], b[i : i + 1]) for i in range(4)])

    torch.testing.assert_close(psnr_B(a, b), alone)
    assert alone.unique().numel() == 4


def test_psnr_of_equal_images_is_one_hundred():
    a = random_images()

    assert psnr_B(a, a).tolist() == [100.0, 100.0]


@pytest.mark.parametrize("metric", [psnr_B, ssim_B])
def test_images_are_clamped_to_the_range(metric):
    a, b = random_images(), random_images()

    torch.testing.assert_close(metric(a * 3, b), metric((a * 3).clamp(-1, 1), b))


def test_ssim_matches_a_loop_over_windows():
    a = random_images(dtype=torch.float64)
    b = (a + 0.4 * torch.randn(a.shape, dtype=torch.float64)).clamp(-1, 1)

    expected = [
        np.mean([ssim_loop(a[i, c].numpy(), b[i, c].numpy()) for c in range(3)]) for i in range(2)
    ]

    torch.testing.assert_close(ssim_B(a, b), torch.tensor(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        ssim_B(a.float(), b.float()), torch.tensor(expected).float(), rtol=0, atol=1e-5
    )


def test_ssim_is_one_for_equal_images_and_decreases_with_noise():
    a = random_images(1, 32, 32)
    noise = torch.randn(a.shape)

    values = [ssim_B(a, a + scale * noise).item() for scale in (0.0, 0.1, 0.3, 1.0)]

    assert values[0] == pytest.approx(1, abs=1e-6)
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.6


def test_ssim_is_symmetric():
    a, b = random_images(), random_images()

    torch.testing.assert_close(ssim_B(a, b), ssim_B(b, a))


@pytest.mark.parametrize("metric", [psnr_B, ssim_B])
def test_autocast_does_not_change_the_values(metric):
    a, b = random_images(), random_images()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = metric(a, b)

    assert under_autocast.dtype == torch.float32
    assert torch.equal(under_autocast, metric(a, b))


def test_images_smaller_than_the_ssim_window_are_errors():
    with pytest.raises(ValueError, match="11 x 11 pixels, but these images have only 16 x 10"):
        ssim_B(random_images(width=10), random_images(width=10))


@pytest.mark.parametrize("metric", [psnr_B, ssim_B])
def test_different_shapes_are_errors(metric):
    with pytest.raises(ValueError, match="must have the same shape"):
        metric(random_images(2), random_images(1))


# ---- Frechet distance


def test_frechet_distance_matches_the_formula_with_a_matrix_root():
    real, fake = (
        torch.randn(50, 6).double(),
        torch.randn(70, 6).double() @ torch.randn(6, 6).double() + 0.5,
    )
    covariances = np.cov(real.numpy().T), np.cov(fake.numpy().T)

    root_trace = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).real).sum()
    expected = ((real.mean(0) - fake.mean(0)) ** 2).sum().item()
    expected += np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * root_trace

    assert frechet_distance(moments(real), moments(fake)) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(moments(fake), moments(real)) == pytest.approx(expected, rel=1e-10)


def test_moments_of_batches_add_up():
    features, others = torch.randn(2, 40, 5)
    expected = frechet_distance(moments(features), moments(others))

    parts = add_moments(*(moments(part) for part in features.split([1, 7, 20, 12])))

    assert frechet_distance(parts, moments(others)) == pytest.approx(expected, rel=1e-12)


def test_distance_is_zero_to_itself_and_squared_for_a_shift():
    features = torch.randn(30, 8).double()

    assert frechet_distance(moments(features), moments(features)) == pytest.approx(0, abs=1e-10)
    assert frechet_distance(moments(features), moments(features + 3)) == pytest.approx(
        8 * 9, rel=1e-10
    )


def test_distance_is_correct_with_fewer_examples_than_dimensions():
    """For centered rows A and B the trace of the root is the nuclear norm of A B^T."""
    real, fake = torch.randn(5, 64).double(), 2 * torch.randn(7, 64).double()
    a = (real - real.mean(0)) / math.sqrt(4)
    b = (fake - fake.mean(0)) / math.sqrt(6)

    expected = (real.mean(0) - fake.mean(0)).square().sum() + a.square().sum() + b.square().sum()
    expected -= 2 * torch.linalg.matrix_norm(a @ b.T, "nuc")

    assert frechet_distance(moments(real), moments(fake)) == pytest.approx(
        expected.item(), rel=1e-5
    )
    assert frechet_distance(moments(real), moments(real)) == pytest.approx(0, abs=1e-4)


def test_features_far_from_zero_keep_their_precision():
    features, others = torch.randn(2, 200, 4).double()

    expected = frechet_distance(moments(features), moments(others))

    assert frechet_distance(moments(features + 1000), moments(others + 1000)) == pytest.approx(
        expected, rel=1e-6
    )


def test_half_precision_features_are_summed_in_float64():
    features = torch.randn(1000, 3).bfloat16()

    torch.testing.assert_close(moments(features)["outer"], features.double().T @ features.double())
    assert moments(features)["count"].item() == 1000


def test_single_example_is_an_error():
    with pytest.raises(ValueError, match="at least 2 examples on each side, got 1"):
        frechet_distance(moments(torch.randn(9, 3)), moments(torch.randn(1, 3)))

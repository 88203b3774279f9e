"""Each number against its formula, written out slowly here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.metrics.image import code_perplexity, code_usage, frechet, moments, psnr_B, ssim_B


def slow_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Wang 2004, eq. 13 to 16, window by window, of one channel in [-1, 1]."""
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


def images(
    count: int = 2, height: int = 16, width: int = 13, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.rand(count, 3, height, width, dtype=dtype) * 2 - 1


def merged(*parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


# ------------------------------------------------------------------------------------------------------------- images


def test_a_difference_of_a_tenth_of_the_range_is_twenty_decibels():
    a = torch.zeros(3, 3, 8, 8)

    torch.testing.assert_close(psnr_B(a, a + 0.2), torch.full((3,), 20.0))


def test_every_example_has_its_own_psnr():
    a, b = images(4), images(4)

    alone = torch.cat([psnr_B(a[i : i + 1], b[i : i + 1]) for i in range(4)])

    torch.testing.assert_close(psnr_B(a, b), alone)
    assert alone.unique().numel() == 4


def test_equal_images_have_a_psnr_that_can_be_averaged():
    a = images()

    assert psnr_B(a, a).tolist() == [100.0, 100.0]


@pytest.mark.parametrize("measure", [psnr_B, ssim_B])
def test_what_lies_outside_the_range_counts_as_it_would_in_a_file(measure):
    a, b = images(), images()

    torch.testing.assert_close(measure(a * 3, b), measure((a * 3).clamp(-1, 1), b))


def test_ssim_is_the_papers_formula_window_by_window():
    a = images(dtype=torch.float64)
    b = (a + 0.4 * torch.randn(a.shape, dtype=torch.float64)).clamp(-1, 1)

    expected = [
        np.mean([slow_ssim(a[i, c].numpy(), b[i, c].numpy()) for c in range(3)]) for i in range(2)
    ]

    torch.testing.assert_close(ssim_B(a, b), torch.tensor(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        ssim_B(a.float(), b.float()), torch.tensor(expected).float(), rtol=0, atol=1e-5
    )


def test_ssim_is_one_for_equal_images_and_falls_with_noise():
    a = images(1, 32, 32)
    noise = torch.randn(a.shape)

    values = [ssim_B(a, a + strength * noise).item() for strength in (0.0, 0.1, 0.3, 1.0)]

    assert values[0] == pytest.approx(1, abs=1e-6)
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.6


def test_ssim_does_not_care_which_image_comes_first():
    a, b = images(), images()

    torch.testing.assert_close(ssim_B(a, b), ssim_B(b, a))


@pytest.mark.parametrize("measure", [psnr_B, ssim_B])
def test_autocast_does_not_touch_the_numbers(measure):
    a, b = images(), images()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = measure(a, b)

    assert under_autocast.dtype == torch.float32
    assert torch.equal(under_autocast, measure(a, b))


def test_images_smaller_than_the_window_are_refused():
    with pytest.raises(ValueError, match="11 x 11 pixels, and these images have only 16 x 10"):
        ssim_B(images(width=10), images(width=10))


@pytest.mark.parametrize("measure", [psnr_B, ssim_B])
def test_images_of_two_shapes_are_refused(measure):
    with pytest.raises(ValueError, match="must be the same"):
        measure(images(2), images(1))


# -------------------------------------------------------------------------------------------------------------- codes


def test_usage_is_the_share_of_codes_that_were_seen():
    assert code_usage(torch.tensor([5, 0, 1, 0])).item() == 0.5
    assert code_usage(torch.tensor([[1, 1], [0, 9]])).tolist() == [1.0, 0.5]


def test_perplexity_is_the_exponential_of_the_entropy():
    counts = torch.tensor([6, 3, 1, 0])
    entropy = -(0.6 * math.log(0.6) + 0.3 * math.log(0.3) + 0.1 * math.log(0.1))

    assert code_perplexity(counts).item() == pytest.approx(math.exp(entropy), rel=1e-12)


def test_codes_used_equally_are_all_counted_and_nothing_counted_is_no_error():
    counts = torch.stack([torch.full((64,), 10_000_000), torch.zeros(64, dtype=torch.int64)])

    assert code_perplexity(counts).tolist() == pytest.approx([64, 1])
    assert code_usage(counts).tolist() == [1, 0]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40))
def test_perplexity_lies_between_one_and_the_codes_in_use(counts):
    used = max(sum(count > 0 for count in counts), 1)

    assert 1 - 1e-9 <= code_perplexity(torch.tensor(counts)).item() <= used + 1e-9


# ---------------------------------------------------------------------------------------------------- Frechet distance


def test_the_distance_of_two_sets_is_the_formula_with_a_matrix_root():
    real, fake = (
        torch.randn(50, 6).double(),
        torch.randn(70, 6).double() @ torch.randn(6, 6).double() + 0.5,
    )
    covariances = np.cov(real.numpy().T), np.cov(fake.numpy().T)

    root_trace = np.sqrt(np.linalg.eigvals(covariances[0] @ covariances[1]).real).sum()
    expected = ((real.mean(0) - fake.mean(0)) ** 2).sum().item()
    expected += np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * root_trace

    assert frechet(moments(real), moments(fake)) == pytest.approx(expected, rel=1e-10)
    assert frechet(moments(fake), moments(real)) == pytest.approx(expected, rel=1e-10)


def test_moments_add_up_over_batches_of_any_size():
    features, others = torch.randn(2, 40, 5)
    whole = frechet(moments(features), moments(others))

    parts = merged(*(moments(part) for part in features.split([1, 7, 20, 12])))

    assert frechet(parts, moments(others)) == pytest.approx(whole, rel=1e-12)


def test_a_set_is_at_no_distance_from_itself_and_a_shift_counts_squared():
    features = torch.randn(30, 8).double()

    assert frechet(moments(features), moments(features)) == pytest.approx(0, abs=1e-10)
    assert frechet(moments(features), moments(features + 3)) == pytest.approx(8 * 9, rel=1e-10)


def test_fewer_examples_than_dimensions_give_the_right_number_too():
    """The reference never makes a covariance: for centred rows A and B the root's trace is A B^T's
    nuclear norm."""
    real, fake = torch.randn(5, 64).double(), 2 * torch.randn(7, 64).double()
    a = (real - real.mean(0)) / math.sqrt(4)
    b = (fake - fake.mean(0)) / math.sqrt(6)

    expected = (real.mean(0) - fake.mean(0)).square().sum() + a.square().sum() + b.square().sum()
    expected -= 2 * torch.linalg.matrix_norm(a @ b.T, "nuc")

    assert frechet(moments(real), moments(fake)) == pytest.approx(expected.item(), rel=1e-5)
    assert frechet(moments(real), moments(real)) == pytest.approx(0, abs=1e-4)


def test_features_far_from_zero_lose_no_digits_that_matter():
    features, others = torch.randn(2, 200, 4).double()

    near = frechet(moments(features), moments(others))

    assert frechet(moments(features + 1000), moments(others + 1000)) == pytest.approx(
        near, rel=1e-6
    )


def test_half_precision_features_are_summed_in_full():
    features = torch.randn(1000, 3).bfloat16()

    torch.testing.assert_close(moments(features)["outer"], features.double().T @ features.double())
    assert moments(features)["count"].item() == 1000


def test_a_single_example_has_no_covariance_and_is_refused():
    with pytest.raises(ValueError, match="2 examples or more on each side, and was given 1"):
        frechet(moments(torch.randn(9, 3)), moments(torch.randn(1, 3)))

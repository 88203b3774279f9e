"""Numbers about images and codes that are watched and never descended.

Whatever is averaged over a held-out set is given per example (names ending in _B) or as additive
moments, so that a set may be cut into any batches over any processes and still give one number.

B examples, D width of a feature, V codes. Images are (B, 3, H, W); what lies outside [-1, 1] is
clamped, as it would be in a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tessera.losses import to_fp32

RANGE = 2.0
"""From the darkest pixel to the brightest: the peak of PSNR, and L of SSIM."""

MOST_DECIBELS = 100.0
"""The PSNR of equal images, which by its formula is infinite and would swallow every average it is
in."""

SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SSIM_K1, SSIM_K2 = 0.01, 0.03


def psnr_B(a: Tensor, b: Tensor) -> Tensor:
    """(B,) decibels: peak signal-to-noise ratio, at most 100."""
    a, b = _comparable(a, b)
    squared_error_B = (a - b).square().flatten(1).mean(1)
    return (10 * torch.log10(RANGE**2 / squared_error_B)).clamp(max=MOST_DECIBELS)


def ssim_B(a: Tensor, b: Tensor) -> Tensor:
    """(B,): structural similarity (Wang 2004, eq. 13), the mean over channels and all windows that
    lie in the image.

    The paper looks at brightness only; here red, green and blue are each looked at and averaged.
    """
    a, b = _comparable(a, b)
    if min(a.shape[2:]) < SSIM_WINDOW:
        raise ValueError(
            f"SSIM looks through windows of {SSIM_WINDOW} x {SSIM_WINDOW} pixels, and these images have only "
            f"{a.shape[2]} x {a.shape[3]}. Use larger images, or PSNR."
        )
    mean_a, mean_b, square_a, square_b, product = (
        _windowed(image) for image in (a, b, a * a, b * b, a * b)
    )
    variance_a, variance_b, covariance = (
        square_a - mean_a**2,
        square_b - mean_b**2,
        product - mean_a * mean_b,
    )
    steady_mean, steady_variance = (SSIM_K1 * RANGE) ** 2, (SSIM_K2 * RANGE) ** 2
    brightness = (2 * mean_a * mean_b + steady_mean) / (mean_a**2 + mean_b**2 + steady_mean)
    structure = (2 * covariance + steady_variance) / (variance_a + variance_b + steady_variance)
    return (brightness * structure).flatten(1).mean(1)


def code_usage(counts: Tensor) -> Tensor:
    """The share of the codes that were used at all. `counts` is (..., V); each row is looked at by
    itself."""
    return (counts > 0).double().mean(-1)


def code_bits(counts: Tensor) -> Tensor:
    """What the counted symbols take on disk, in bits, each written by itself. `counts` is (...,
    V)."""
    return counts.sum() * math.log2(counts.shape[-1])


def code_perplexity(counts: Tensor) -> Tensor:
    """How many codes, used equally often, would be as varied as these: between 1 and V. 1 if
    nothing was counted."""
    shares = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.special.entr(shares).sum(-1).exp()


def moments(features_BD: Tensor) -> dict[str, Tensor]:
    """What the Frechet distance needs to know of some examples. The moments of two sets add up to
    those of both."""
    features_BD = features_BD.detach().double()
    return {
        "count": torch.tensor(
            float(len(features_BD)), dtype=torch.float64, device=features_BD.device
        ),
        "sum": features_BD.sum(0),
        "outer": features_BD.T @ features_BD,
    }


def frechet(real: Mapping[str, Tensor], fake: Mapping[str, Tensor]) -> float:
    """The squared Frechet distance of two Gaussians with these moments (Heusel 2017, arXiv
    1706.08500, eq. 6).

    It is named after the network that made the features, and is "FID" only for Inception's. It
    falls with the number of
    examples: compare only numbers of equal counts, and give beside it the distance of two halves of
    the real set.
    """
    mean_real, covariance_real = _gaussian(real)
    mean_fake, covariance_fake = _gaussian(fake)
    # The trace of (AB)^1/2 is the sum of the singular values of A^1/2 B^1/2. Taken so, no square
    # root of a product of covariances is needed, which with fewer examples than D has eigenvalues
    # of no certain sign.
    overlap = torch.linalg.svdvals(_root(covariance_real) @ _root(covariance_fake)).sum()
    spread = covariance_real.trace() + covariance_fake.trace() - 2 * overlap
    return ((mean_real - mean_fake).square().sum() + spread).clamp(min=0).item()


def _gaussian(moments: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased covariance."""
    count = moments["count"].item()
    if count < 2:
        raise ValueError(
            f"A Frechet distance needs 2 examples or more on each side, and was given {count:.0f}."
        )
    mean = moments["sum"] / count
    return mean, (moments["outer"] - count * torch.outer(mean, mean)) / (count - 1)


def _root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def _comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in range and in float32 or better."""
    if a.shape != b.shape or a.ndim != 4:
        raise ValueError(
            f"Images of shapes {tuple(a.shape)} and {tuple(b.shape)}: both must be the same (B, C, H, W)."
        )
    return to_fp32(a).clamp(-1, 1), to_fp32(b).clamp(-1, 1)


def _windowed(image: Tensor) -> Tensor:
    """The Gaussian mean around each pixel that has a whole window around it.

    Shifted sums and not a convolution: autocast and TF32 shorten the numbers that go into a
    convolution, and variances taken as a difference of two such means would be lost.
    """
    offsets = torch.arange(SSIM_WINDOW) - SSIM_WINDOW // 2
    bell = torch.exp(-(offsets.double() ** 2) / (2 * SSIM_SIGMA**2))
    weights = (bell / bell.sum()).tolist()
    for axis in (2, 3):
        length = image.shape[axis] - SSIM_WINDOW + 1
        shifted = (
            weight * image.narrow(axis, start, length) for start, weight in enumerate(weights)
        )
        image = sum(shifted, start=image.new_zeros(()))
    return image

"""Image metrics: PSNR, SSIM, chroma, contrast, and the Frechet distance of features.

What is averaged over a validation set is computed per example (names that end in _B) or as additive
moments, so that a set may be split into any batches over any number of processes.

B examples, D feature dimension. Images are (B, 3, H, W) and are clamped to [-1, 1], as they would
be in a file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tessera.nn.precision import to_fp32

DATA_RANGE = 2.0
"""The difference of the largest and the smallest pixel value: the peak of PSNR, and L of SSIM."""

MAX_DECIBELS = 100.0
"""The PSNR of equal images, which is infinite by its formula and would make every mean infinite."""

SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SSIM_K1, SSIM_K2 = 0.01, 0.03


def psnr_B(a: Tensor, b: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in decibels, at most 100, (B,)."""
    a, b = _check_images(a, b)
    squared_error_B = (a - b).square().flatten(1).mean(1)
    return (10 * torch.log10(DATA_RANGE**2 / squared_error_B)).clamp(max=MAX_DECIBELS)


def ssim_B(a: Tensor, b: Tensor) -> Tensor:
    """Return the structural similarity (Wang 2004, eq. 13), (B,).

    The mean over channels and over all windows that lie within the image. The paper has luminance
    only; here red, green and blue are computed separately and averaged.
    """
    a, b = _check_images(a, b)
    if min(a.shape[2:]) < SSIM_WINDOW:
        raise ValueError(
            f"SSIM has windows of {SSIM_WINDOW} x {SSIM_WINDOW} pixels, but these images have only "
            f"{a.shape[2]} x {a.shape[3]}: use larger images, or PSNR."
        )
    mean_a, mean_b, square_a, square_b, product = (
        _gaussian_filter(image) for image in (a, b, a * a, b * b, a * b)
    )
    variance_a, variance_b, covariance = (
        square_a - mean_a**2,
        square_b - mean_b**2,
        product - mean_a * mean_b,
    )
    c1, c2 = (SSIM_K1 * DATA_RANGE) ** 2, (SSIM_K2 * DATA_RANGE) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (variance_a + variance_b + c2)
    return (luminance * structure).flatten(1).mean(1)


def chroma_B(images: Tensor) -> Tensor:
    """Return the mean chroma of images with red, green and blue channels, (B,).

    It is the distance of a pixel from grey in the plane of its colour differences: 0 for grey
    images, and at most 1.1.
    """
    return mean_norm_B(colour_differences(images.clamp(-1, 1)))


def chroma_error_B(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean distance of two images in the plane of the colour differences, (B,).

    Unlike a difference of their chroma, it also measures a wrong hue.
    """
    output, target = output.clamp(-1, 1), target.clamp(-1, 1)
    return mean_norm_B(colour_differences(output) - colour_differences(target))


def relative_chroma(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Return chroma and chroma error of reconstructions, relative to the chroma of the originals.

    `totals` are sums over examples. Grey originals have no chroma, up to rounding, and then the
    result is empty.
    """
    if totals.get("real/chroma", 0) <= 1e-3 * totals["examples"]:
        return {}
    return {
        "chroma": float(totals["reconstruction/chroma"] / totals["real/chroma"]),
        "chroma_error": float(totals["chroma_error"] / totals["real/chroma"]),
    }


def mean_norm_B(vectors: Tensor) -> Tensor:
    """Return the mean length of the vectors (B, C, H, W) of all pixels, (B,)."""
    return torch.linalg.vector_norm(vectors, dim=1).flatten(1).mean(1)


def colour_differences(images: Tensor) -> Tensor:
    """Return the blue and red colour differences of ITU-R BT.601, (B, 2, H, W), 0 where grey."""
    red, green, blue = to_fp32(images[:, :3]).unbind(1)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    return torch.stack([(blue - luma) / 1.772, (red - luma) / 1.402], dim=1)


def moments(features_BD: Tensor) -> dict[str, Tensor]:
    """Return the moments for `frechet_distance`. Those of two sets add up to those of both."""
    features_BD = features_BD.detach().double()
    return {
        "count": torch.tensor(
            float(len(features_BD)), dtype=torch.float64, device=features_BD.device
        ),
        "sum": features_BD.sum(0),
        "outer": features_BD.T @ features_BD,
    }


def frechet_distance(real: Mapping[str, Tensor], fake: Mapping[str, Tensor]) -> float:
    """Return the squared Frechet distance of two Gaussians (Heusel 2017, arXiv 1706.08500, eq. 6).

    Report it under the name of the network that computed the features; only with Inception it is
    FID. It decreases with the number of examples: compare values of equal counts only, and report
    the distance of two halves of the real set beside it.
    """
    mean_real, covariance_real = _fit_gaussian(real)
    mean_fake, covariance_fake = _fit_gaussian(fake)
    # The trace of (AB)^1/2 is the sum of the singular values of A^1/2 B^1/2. This needs no square
    # root of a product of covariances, whose eigenvalues have no reliable sign if there are fewer
    # examples than D.
    overlap = torch.linalg.svdvals(_matrix_sqrt(covariance_real) @ _matrix_sqrt(covariance_fake))
    spread = covariance_real.trace() + covariance_fake.trace() - 2 * overlap.sum()
    return ((mean_real - mean_fake).square().sum() + spread).clamp(min=0).item()


def _fit_gaussian(moments: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean and the unbiased covariance."""
    count = moments["count"].item()
    if count < 2:
        raise ValueError(
            f"A Frechet distance needs at least 2 examples on each side, got {count:.0f}: use a "
            "larger set."
        )
    mean = moments["sum"] / count
    return mean, (moments["outer"] - count * torch.outer(mean, mean)) / (count - 1)


def _matrix_sqrt(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def _check_images(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Check the shapes, and return both images clamped and in float32 or float64."""
    if a.shape != b.shape or a.ndim != 4:
        raise ValueError(
            f"Got images of shapes {tuple(a.shape)} and {tuple(b.shape)}: both must have the same "
            "shape (B, C, H, W). Resize or crop them first."
        )
    return to_fp32(a).clamp(-1, 1), to_fp32(b).clamp(-1, 1)


def _gaussian_filter(image: Tensor) -> Tensor:
    """Return the Gaussian mean around each pixel whose window lies within the image.

    Computed as shifted sums and not as a convolution: autocast and TF32 round the inputs of
    convolutions, and variances, which are differences of two such means, would be lost.
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


@torch.no_grad()
def relative_contrast(output: Tensor, target: Tensor) -> Tensor:
    """Return the contrast of reconstructions relative to originals, near 0 if they are flat.

    It uses every 16th pixel to be cheap.
    """
    pair = torch.stack([output[..., ::4, ::4].clamp(-1, 1), target[..., ::4, ::4]])
    output_B, target_B = pair.float().flatten(2).std(-1, correction=0)
    return (output_B / target_B.clamp_min(1e-3)).mean()

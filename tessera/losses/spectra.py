"""Sound as pictures of its frequencies: the short-time Fourier transform, mel bands, and MFCC with
their deltas.

B counts examples, N samples, F frames, K frequencies, M mel bands, C coefficients. Frame f belongs
to the samples from f * hop to (f + 1) * hop, and its window is centred on these, so N samples give
ceil(N / hop) frames, and frames at a rate of rate_hz / hop stand in step with whatever else has
that rate. Beyond its ends a sound is silent: zeros after it change no frame whose window does not
reach them. Everything is in float32 or better, and has finite gradients, in silence too.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.losses import to_fp32

FINER = 16  # points at which a filter is looked at between two frequencies of the transform
QUIET = 1e-5  # magnitudes below this are heard as nothing: 100 dB below a full-scale sine


def stft(samples_BN: Tensor, window: int, hop: int) -> Tensor:
    """(B, K, F) complex, K = window // 2 + 1, under a Hann window; divided so that a full-scale
    sine has a magnitude of 1."""
    if not 1 <= hop <= window:
        raise ValueError(
            f"A hop is at least 1 sample and at most the window, but they are {hop} and {window}."
        )
    samples_BN = to_fp32(samples_BN)
    frames = -(-samples_BN.shape[-1] // hop)
    before = (window - hop) // 2
    after = (frames - 1) * hop + window - before - samples_BN.shape[-1]
    hann = torch.hann_window(window, dtype=samples_BN.dtype, device=samples_BN.device)
    padded = F.pad(samples_BN, (before, after))
    return torch.stft(
        padded, window, hop, window=hann * (4 / window), center=False, return_complex=True
    )


def mel_of_hertz(hertz: float) -> float:
    """O'Shaughnessy's formula (Speech Communication, 1987): equal steps sound equally far apart."""
    return 2595 * math.log10(1 + hertz / 700)


@lru_cache(maxsize=256)
def mel_filters(bands: int, window: int, rate_hz: int) -> Tensor:
    """(M, K): overlapping triangles, evenly spaced in mel from 0 to half of the rate; between the
    outer peaks they sum to 1.

    A weight is the mean of the triangle over the width of one frequency and not its height in the
    middle: where bands are narrower than frequencies, as they are at the low end of short windows,
    none of them falls between two and stays empty.
    """
    peaks = torch.linspace(0, mel_of_hertz(rate_hz / 2), bands + 2, dtype=torch.float64)
    edges_hz = 700 * (10 ** (peaks / 2595) - 1)
    frequencies = window // 2 + 1
    points = (torch.arange(frequencies * FINER, dtype=torch.float64) + 0.5) / FINER - 0.5
    points_hz = points.abs() * rate_hz / window
    low, peak, high = (edges_hz[at : at + bands, None] for at in range(3))
    triangles = torch.minimum(
        (points_hz - low) / (peak - low), (high - points_hz) / (high - peak)
    ).clamp(min=0)
    return triangles.unflatten(1, (frequencies, FINER)).mean(dim=2).float()


def mel(samples_BN: Tensor, *, rate_hz: int, window: int, hop: int, bands: int) -> Tensor:
    """(B, M, F): magnitudes in mel bands."""
    magnitudes = stft(samples_BN, window, hop).abs()
    return mel_filters(bands, window, rate_hz).to(magnitudes) @ magnitudes


def log_mel(
    samples_BN: Tensor, *, rate_hz: int, window: int, hop: int, bands: int, quiet: float = QUIET
) -> Tensor:
    """(B, M, F): natural logarithms of the magnitudes in mel bands; what is below `quiet` counts as
    `quiet`."""
    return (
        mel(samples_BN, rate_hz=rate_hz, window=window, hop=hop, bands=bands).clamp(min=quiet).log()
    )


def mfcc(
    samples_BN: Tensor,
    *,
    rate_hz: int,
    window: int,
    hop: int,
    bands: int = 40,
    coefficients: int = 13,
) -> Tensor:
    """(B, C, F): the cosine transform of the log-mel bands (Davis and Mermelstein 1980), whose
    first numbers hold the shape of a spectrum and not its pitch. The first one is loudness."""
    spectrum = log_mel(samples_BN, rate_hz=rate_hz, window=window, hop=hop, bands=bands)
    return cosines(coefficients, bands).to(spectrum) @ spectrum


def cosines(coefficients: int, bands: int) -> Tensor:
    """(C, M): the first rows of the orthonormal discrete cosine transform, type 2."""
    rows, columns = torch.arange(coefficients)[:, None], torch.arange(bands)
    basis = torch.cos(math.pi / bands * rows * (columns + 0.5)) * math.sqrt(2 / bands)
    basis[0] /= math.sqrt(2)
    return basis


def with_deltas(features_BCF: Tensor, reach: int = 2) -> Tensor:
    """(B, 3 C, F): the features, how fast they change, and how fast that changes.

    39 numbers of 13 MFCC are what HuBERT's first iteration clusters (arXiv 2106.07447).
    """
    first = deltas(features_BCF, reach)
    return torch.cat([features_BCF, first, deltas(first, reach)], dim=1)


def deltas(features_BCF: Tensor, reach: int = 2) -> Tensor:
    """The slope of the line through 2 * reach + 1 frames (least squares); beyond its ends a sound
    stays as it is there."""
    steps = torch.arange(-reach, reach + 1, dtype=features_BCF.dtype, device=features_BCF.device)
    padded = F.pad(features_BCF, (reach, reach), mode="replicate")
    return (padded.unfold(2, 2 * reach + 1, 1) * (steps / steps.square().sum())).sum(dim=3)

"""Spectrograms: the short-time Fourier transform, mel bands, and MFCC with their deltas.

B examples, N samples, F frames, K frequencies, M mel bands, C coefficients. Frame f belongs to the
samples from f * hop to (f + 1) * hop, and its window is centered on these, so N samples give
ceil(N / hop) frames, and frames at a rate of rate_hz / hop are aligned with anything else of that
rate. Audio is zero beyond its ends: zeros after it change no frame whose window does not reach
them. Everything is computed in float32 or float64 and has finite gradients, in silence too.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.nn.precision import to_fp32

POINTS_PER_BIN = 16
"""Points at which a mel filter is evaluated within one frequency bin."""
MIN_MAGNITUDE = 1e-5
"""Smaller magnitudes are clamped to this: 100 dB below a full-scale sine."""


def stft(samples_BN: Tensor, window: int, hop: int) -> Tensor:
    """Return the complex spectrogram under a Hann window, (B, K, F) with K = window // 2 + 1.

    It is scaled so that a full-scale sine has a magnitude of 1.
    """
    if not 1 <= hop <= window:
        raise ValueError(
            f"hop must be at least 1 sample and at most the window, got {hop} and {window}."
        )
    samples_BN = to_fp32(samples_BN)
    frames = -(-samples_BN.shape[-1] // hop)
    left = (window - hop) // 2
    right = (frames - 1) * hop + window - left - samples_BN.shape[-1]
    hann = torch.hann_window(window, dtype=samples_BN.dtype, device=samples_BN.device)
    padded = F.pad(samples_BN, (left, right))
    return torch.stft(
        padded, window, hop, window=hann * (4 / window), center=False, return_complex=True
    )


def hz_to_mel(hertz: float) -> float:
    """Convert a frequency to mel (O'Shaughnessy, Speech Communication, 1987)."""
    return 2595 * math.log10(1 + hertz / 700)


@lru_cache(maxsize=256)
def mel_filterbank(bands: int, window: int, rate_hz: int) -> Tensor:
    """Return triangular filters, evenly spaced in mel from 0 to half of the rate, (M, K).

    Between the outer peaks the filters of a frequency sum to 1. A weight is the mean of the
    triangle over a frequency bin and not its height at the center: where bands are narrower than
    bins, as at the low end of short windows, none falls between two bins and is empty.
    """
    peaks = torch.linspace(0, hz_to_mel(rate_hz / 2), bands + 2, dtype=torch.float64)
    edges_hz = 700 * (10 ** (peaks / 2595) - 1)
    frequencies = window // 2 + 1
    points = (
        torch.arange(frequencies * POINTS_PER_BIN, dtype=torch.float64) + 0.5
    ) / POINTS_PER_BIN - 0.5
    points_hz = points.abs() * rate_hz / window
    low, peak, high = (edges_hz[at : at + bands, None] for at in range(3))
    triangles = torch.minimum(
        (points_hz - low) / (peak - low), (high - points_hz) / (high - peak)
    ).clamp(min=0)
    return triangles.unflatten(1, (frequencies, POINTS_PER_BIN)).mean(dim=2).float()


def mel_spectrogram(
    samples_BN: Tensor, *, rate_hz: int, window: int, hop: int, bands: int
) -> Tensor:
    """Return magnitudes in mel bands, (B, M, F)."""
    magnitudes = stft(samples_BN, window, hop).abs()
    like = magnitudes.dtype, magnitudes.device
    return constant_filterbank(bands, window, rate_hz, *like) @ magnitudes


@lru_cache(maxsize=256)
def cached_filterbank(
    bands: int, window: int, rate_hz: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the filters on a device, to which they are copied once."""
    return mel_filterbank(bands, window, rate_hz).to(device, dtype)


@torch.compiler.assume_constant_result
def constant_filterbank(
    bands: int, window: int, rate_hz: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return cached_filterbank(bands, window, rate_hz, dtype, device)


def log_mel_spectrogram(
    samples_BN: Tensor,
    *,
    rate_hz: int,
    window: int,
    hop: int,
    bands: int,
    min_magnitude: float = MIN_MAGNITUDE,
) -> Tensor:
    """Return natural logarithms of the magnitudes in mel bands, (B, M, F)."""
    magnitudes = mel_spectrogram(samples_BN, rate_hz=rate_hz, window=window, hop=hop, bands=bands)
    return magnitudes.clamp(min=min_magnitude).log()


def mfcc(
    samples_BN: Tensor,
    *,
    rate_hz: int,
    window: int,
    hop: int,
    bands: int = 40,
    coefficients: int = 13,
) -> Tensor:
    """Return mel-frequency cepstral coefficients (Davis and Mermelstein 1980), (B, C, F).

    They are the cosine transform of the log-mel bands. The first one is loudness, the next ones
    describe the spectral envelope and not the pitch.
    """
    spectrum = log_mel_spectrogram(samples_BN, rate_hz=rate_hz, window=window, hop=hop, bands=bands)
    return constant_dct(coefficients, bands, spectrum.dtype, spectrum.device) @ spectrum


@torch.compiler.assume_constant_result
def constant_dct(coefficients: int, bands: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return cached_dct(coefficients, bands, dtype, device)


@lru_cache(maxsize=64)
def cached_dct(coefficients: int, bands: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the cosine transform on a device, to which it is copied once."""
    return dct_matrix(coefficients, bands).to(device, dtype)


def dct_matrix(coefficients: int, bands: int) -> Tensor:
    """Return the first rows of the orthonormal discrete cosine transform of type 2, (C, M)."""
    rows, columns = torch.arange(coefficients)[:, None], torch.arange(bands)
    basis = torch.cos(math.pi / bands * rows * (columns + 0.5)) * math.sqrt(2 / bands)
    basis[0] /= math.sqrt(2)
    return basis


def append_deltas(features_BCF: Tensor, reach: int = 2) -> Tensor:
    """Append first and second deltas to features, (B, 3 C, F).

    With 13 MFCC these are the 39 features that are clustered for HuBERT's first iteration (arXiv
    2106.07447).
    """
    first = compute_deltas(features_BCF, reach)
    return torch.cat([features_BCF, first, compute_deltas(first, reach)], dim=1)


def compute_deltas(features_BCF: Tensor, reach: int = 2) -> Tensor:
    """Return the least-squares slope over 2 * reach + 1 frames; the ends are replicated."""
    steps = torch.arange(-reach, reach + 1, dtype=features_BCF.dtype, device=features_BCF.device)
    padded = F.pad(features_BCF, (reach, reach), mode="replicate")
    return (padded.unfold(2, 2 * reach + 1, 1) * (steps / steps.square().sum())).sum(dim=3)

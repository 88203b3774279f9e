"""Speech metrics: short-time objective intelligibility (STOI).

B examples, N samples at RATE_HZ, F frames, P samples of a frame, S segments, J bands. Audio is
(B, 1, N).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.nn.precision import to_fp32

RATE_HZ = 10_000
WINDOW, HOP, FFT_SIZE = 256, 128, 512
NUM_BANDS, LOWEST_HZ = 15, 150.0
"""One-third octave bands, and the center of the lowest."""
SEGMENT = 30
"""Frames that are compared at a time: 384 ms, about one or two syllables."""
DYNAMIC_RANGE_DB = 40.0
"""Frames in which the original is quieter than its loudest frame by more than this are removed."""
CLIP = 1 + 10 ** (15 / 20)
"""The largest ratio of a band to the original: louder output is all distortion and is clipped."""


@torch.no_grad()
def stoi_B(
    output: Tensor, original: Tensor, *, rate_hz: int, lengths_B: Tensor | None = None
) -> Tensor:
    """Return STOI (Taal 2011, doi.org/10.1109/TASL.2011.2114881, section II), (B,).

    It ranges from about 0, unintelligible, to 1. It is NaN where there is too little to compare,
    less than 0.4 s that is not silent: leave these examples out of means.
    """
    if output.shape != original.shape or output.ndim != 3 or output.shape[1] != 1:
        raise ValueError(
            f"Got audio of shapes {tuple(output.shape)} and {tuple(original.shape)}: both must "
            "have the same shape (B, 1, N). Mix down and trim them first."
        )
    lengths = [output.shape[2]] * len(output) if lengths_B is None else lengths_B.tolist()
    pairs = zip(to_fp32(output)[:, 0], to_fp32(original)[:, 0], lengths, strict=True)
    values = [
        compute_stoi(*(resample(audio[:length], rate_hz) for audio in (fake, real)))
        for fake, real, length in pairs
    ]
    return torch.stack(values) if values else output.new_zeros(0)


def compute_stoi(fake_N: Tensor, real_N: Tensor) -> Tensor:
    """Return the mean correlation of band envelopes over bands and segments (eq. 5 and 6)."""
    fake_FP, real_FP = split_frames(fake_N), split_frames(real_N)
    loudness_F = real_FP.norm(dim=1)
    audible_F = loudness_F > max_loudness(loudness_F) * 10 ** (-DYNAMIC_RANGE_DB / 20)
    if int(audible_F.sum()) < SEGMENT:
        return fake_N.new_tensor(math.nan)
    fake_SJF, real_SJF = (
        band_segments(overlap_add(frames_FP[audible_F])) for frames_FP in (fake_FP, real_FP)
    )
    eps = torch.finfo(fake_SJF.dtype).eps
    gain = real_SJF.norm(dim=-1, keepdim=True) / (fake_SJF.norm(dim=-1, keepdim=True) + eps)
    fake_SJF = torch.minimum(fake_SJF * gain, real_SJF * CLIP)
    fake_SJF, real_SJF = (part - part.mean(-1, keepdim=True) for part in (fake_SJF, real_SJF))
    norms_SJ = fake_SJF.norm(dim=-1) * real_SJF.norm(dim=-1)
    return ((fake_SJF * real_SJF).sum(-1) / (norms_SJ + eps)).mean()


def max_loudness(loudness_F: Tensor) -> Tensor:
    """Return the maximum, but more than zero, so that no frame of silence is above it."""
    return torch.cat(
        [loudness_F, loudness_F.new_tensor([torch.finfo(loudness_F.dtype).tiny])]
    ).max()


def split_frames(samples_N: Tensor) -> Tensor:
    """Split into frames that overlap by half, under a Hann window without its zeros, (F, 256)."""
    hann = torch.hann_window(
        WINDOW + 2, periodic=False, dtype=samples_N.dtype, device=samples_N.device
    )[1:-1]
    if len(samples_N) < WINDOW:
        return samples_N.new_zeros(0, WINDOW)
    return samples_N.unfold(0, WINDOW, HOP) * hann


def overlap_add(frames_FP: Tensor) -> Tensor:
    """Join frames to samples, (N,)."""
    samples = (len(frames_FP) - 1) * HOP + WINDOW
    return F.fold(frames_FP.T[None], (1, samples), (1, WINDOW), stride=(1, HOP)).flatten()


def band_segments(samples_N: Tensor) -> Tensor:
    """Return the envelope of each band in every run of 30 frames, (S, 15, 30)."""
    power_FK = torch.fft.rfft(split_frames(samples_N), FFT_SIZE).abs().square()
    envelope_FJ = (power_FK @ third_octave_bands().to(power_FK)).sqrt()
    return envelope_FJ.unfold(0, SEGMENT, 1)


@lru_cache(maxsize=1)
def third_octave_bands() -> Tensor:
    """Return which frequencies belong to which band, with edges at the nearest bin, (257, 15)."""
    frequencies = torch.arange(FFT_SIZE // 2 + 1, dtype=torch.float64) * RATE_HZ / FFT_SIZE
    centers = LOWEST_HZ * 2 ** (torch.arange(NUM_BANDS, dtype=torch.float64) / 3)
    low, high = (
        (frequencies[:, None] - centers * 2**side).abs().argmin(0) for side in (-1 / 6, 1 / 6)
    )
    numbers = torch.arange(len(frequencies))[:, None]
    return ((numbers >= low) & (numbers < high)).double()


def resample(samples_N: Tensor, rate_hz: int) -> Tensor:
    """Resample to RATE_HZ by cropping or zero-padding the spectrum.

    The audio is padded with silence to the next length that is whole at both rates.
    """
    down, up = rate_hz // math.gcd(rate_hz, RATE_HZ), RATE_HZ // math.gcd(rate_hz, RATE_HZ)
    if down == up or not len(samples_N):
        return samples_N
    length = math.ceil(len(samples_N) * up / down)
    # With a tenth of a second more, so that the end does not ring at the beginning.
    steps = -(-(len(samples_N) + rate_hz // 10) // down)
    spectrum = torch.fft.rfft(samples_N, steps * down)
    padded = steps * up
    return torch.fft.irfft(spectrum[: padded // 2 + 1], padded)[:length] * (up / down)

"""How much of rebuilt speech can be understood: short-time objective intelligibility.

B examples, N samples at RATE_HZ, F frames, J bands. Sounds are (B, 1, N). Nothing here is
descended.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.losses import to_fp32

RATE_HZ = 10_000
WINDOW, HOP, POINTS = 256, 128, 512
BANDS, LOWEST_HZ = 15, 150.0
"""A third of an octave each, from this centre upwards."""
SEGMENT = 30
"""Frames that are compared at once: 384 ms, as long as a syllable or two."""
RANGE_DB = 40.0
"""Frames of the original that are so much quieter than its loudest are left out of both."""
CLIP = 1 + 10 ** (15 / 20)
"""How many times as loud as in the original a band may be: what is louder is cut, since it is all
distortion by then."""


@torch.no_grad()
def stoi_B(
    output: Tensor, original: Tensor, *, rate_hz: int, lengths_B: Tensor | None = None
) -> Tensor:
    """(B,): from about 0, nothing is understood, to 1 (Taal 2011,
    doi.org/10.1109/TASL.2011.2114881, section II).

    Not a number where there is too little to compare: less than 0.4 s that is not silent. Whoever
    averages leaves these out.
    """
    if output.shape != original.shape or output.ndim != 3 or output.shape[1] != 1:
        raise ValueError(
            f"Sounds of shapes {tuple(output.shape)} and {tuple(original.shape)}: both must be the same (B, 1, N)."
        )
    lengths = [output.shape[2]] * len(output) if lengths_B is None else lengths_B.tolist()
    pairs = zip(to_fp32(output)[:, 0], to_fp32(original)[:, 0], lengths, strict=True)
    told = [
        intelligibility(*(resampled(one[:length], rate_hz) for one in (made, real)))
        for made, real, length in pairs
    ]
    return torch.stack(told) if told else output.new_zeros(0)


def intelligibility(made_N: Tensor, real_N: Tensor) -> Tensor:
    """The mean correlation, over bands and segments, of how loud a band is from frame to frame (eq.
    5 and 6)."""
    made_FP, real_FP = framed(made_N), framed(real_N)
    loud_F = real_FP.norm(dim=1)
    heard_F = loud_F > largest(loud_F) * 10 ** (-RANGE_DB / 20)
    if int(heard_F.sum()) < SEGMENT:
        return made_N.new_tensor(math.nan)
    made_SJF, real_SJF = (segments(joined(frames_FP[heard_F])) for frames_FP in (made_FP, real_FP))
    least = torch.finfo(made_SJF.dtype).eps
    as_loud = real_SJF.norm(dim=-1, keepdim=True) / (made_SJF.norm(dim=-1, keepdim=True) + least)
    made_SJF = torch.minimum(made_SJF * as_loud, real_SJF * CLIP)
    made_SJF, real_SJF = (part - part.mean(-1, keepdim=True) for part in (made_SJF, real_SJF))
    lengths_SJ = made_SJF.norm(dim=-1) * real_SJF.norm(dim=-1)
    return ((made_SJF * real_SJF).sum(-1) / (lengths_SJ + least)).mean()


def largest(loud_F: Tensor) -> Tensor:
    """More than nothing, so that in silence no frame is heard."""
    return torch.cat([loud_F, loud_F.new_tensor([torch.finfo(loud_F.dtype).tiny])]).max()


def framed(samples_N: Tensor) -> Tensor:
    """(F, 256) under a Hann window without its zeros, halfway over one another."""
    hann = torch.hann_window(
        WINDOW + 2, periodic=False, dtype=samples_N.dtype, device=samples_N.device
    )[1:-1]
    if len(samples_N) < WINDOW:
        return samples_N.new_zeros(0, WINDOW)
    return samples_N.unfold(0, WINDOW, HOP) * hann


def joined(frames_FP: Tensor) -> Tensor:
    """The samples again, with the frames that were left out cut out."""
    samples = (len(frames_FP) - 1) * HOP + WINDOW
    return F.fold(frames_FP.T[None], (1, samples), (1, WINDOW), stride=(1, HOP)).flatten()


def segments(samples_N: Tensor) -> Tensor:
    """(S, 15, 30): how loud each band is, in every run of 30 frames."""
    power_FK = torch.fft.rfft(framed(samples_N), POINTS).abs().square()
    loud_FJ = (power_FK @ bands().to(power_FK)).sqrt()
    return loud_FJ.unfold(0, SEGMENT, 1)


@lru_cache(maxsize=1)
def bands() -> Tensor:
    """(257, 15): which frequencies belong to which third of an octave, their edges moved to the
    nearest frequency."""
    frequencies = torch.arange(POINTS // 2 + 1, dtype=torch.float64) * RATE_HZ / POINTS
    centres = LOWEST_HZ * 2 ** (torch.arange(BANDS, dtype=torch.float64) / 3)
    low, high = (
        (frequencies[:, None] - centres * 2**side).abs().argmin(0) for side in (-1 / 6, 1 / 6)
    )
    numbers = torch.arange(len(frequencies))[:, None]
    return ((numbers >= low) & (numbers < high)).double()


def resampled(samples_N: Tensor, rate_hz: int) -> Tensor:
    """At RATE_HZ, by cutting or filling up the spectrum. Silence is added to the next length that
    both rates can have."""
    step, others = rate_hz // math.gcd(rate_hz, RATE_HZ), RATE_HZ // math.gcd(rate_hz, RATE_HZ)
    if step == others or not len(samples_N):
        return samples_N
    kept = math.ceil(len(samples_N) * others / step)
    steps = -(
        -(len(samples_N) + rate_hz // 10) // step
    )  # a tenth of a second, so that the end does not ring at the beginning
    spectrum = torch.fft.rfft(samples_N, steps * step)
    longer = steps * others
    return torch.fft.irfft(spectrum[: longer // 2 + 1], longer)[:kept] * (others / step)

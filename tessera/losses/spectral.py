"""How far apart two sounds are: to the ear, which hears spectra, and sample by sample.

Whatever ends in _B is given per example, so that a loss is its mean, and a held-out set may be cut
into any batches. With `lengths` only the first so many samples of each sound count, whatever
follows, and a sound counts the same alone and beside longer ones.

B examples, N samples, F frames, K frequencies or bands, C channels. Sounds are (B, 1, N) in [-1,
1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.losses import to_fp32
from tessera.losses.spectra import QUIET, mel, stft
from tessera.metrics.image import MOST_DECIBELS

MEL_WINDOWS = (32, 64, 128, 256, 512, 1024, 2048)
STFT_WINDOWS = (512, 1024, 2048)
BANDS_OF_WINDOW = 5 / 32
"""Mel bands for each sample of a window: 5 of 32, 320 of 2048, as in DAC."""


def mel_distance_B(
    a: Tensor,
    b: Tensor,
    *,
    rate_hz: int,
    lengths_B: Tensor | None = None,
    windows: Sequence[int] = MEL_WINDOWS,
) -> Tensor:
    """(B,): how far apart mel bands are on average, in powers of ten, through windows of several
    lengths.

    After DAC (Kumar 2023, arXiv 2306.06546, section 3.5), with our filters and the mean over
    windows: DAC adds them up, which is seven times this.
    """
    pair = _sounds(a, b, lengths_B)
    return torch.stack([_mel_at_B(pair, window, rate_hz) for window in windows]).mean(0)


def _mel_at_B(pair: _Sounds, window: int, rate_hz: int) -> Tensor:
    bands = max(1, round(window * BANDS_OF_WINDOW))
    a, b = (
        mel(sound, rate_hz=rate_hz, window=window, hop=window // 4, bands=bands)
        .clamp(min=QUIET)
        .log10()
        for sound in (pair.a_BN, pair.b_BN)
    )
    return pair.mean_over_frames_B((a - b).abs().mean(1), hop=window // 4)


def stft_distance_B(
    a: Tensor, b: Tensor, *, lengths_B: Tensor | None = None, windows: Sequence[int] = STFT_WINDOWS
) -> Tensor:
    """(B,): the distance of magnitudes and that of their logarithms, through windows of several
    lengths.

    After Parallel WaveGAN (Yamamoto 2020, arXiv 1910.11480, section 2.2). There the first is
    relative to the original, and without bounds where that is silent; here it is relative to both,
    and so between 0 and 1.
    """
    pair = _sounds(a, b, lengths_B)
    return torch.stack([_stft_at_B(pair, window) for window in windows]).mean(0)


def _stft_at_B(pair: _Sounds, window: int) -> Tensor:
    hop = window // 4
    a, b = (stft(sound, window, hop).abs().clamp(min=QUIET) for sound in (pair.a_BN, pair.b_BN))
    apart_B, size_a_B, size_b_B = (pair.size_B(magnitudes, hop) for magnitudes in (a - b, a, b))
    relative_B = apart_B / torch.hypot(size_a_B, size_b_B).clamp(min=QUIET)
    return relative_B + pair.mean_over_frames_B((a.log() - b.log()).abs().mean(1), hop)


def si_sdr_B(output: Tensor, original: Tensor, *, lengths_B: Tensor | None = None) -> Tensor:
    """(B,) decibels: scale-invariant signal-to-distortion ratio (Le Roux 2018, arXiv 1811.02508),
    between -100 and 100.

    Both are first freed of their mean. Where either is silent nothing was rebuilt: -100. Whoever
    averages over recordings leaves silent originals out.
    """
    pair = _sounds(output, original, lengths_B)
    output_BN, original_BN = pair.without_mean(pair.a_BN), pair.without_mean(pair.b_BN)
    energy_B = original_BN.square().sum(1)
    silent_B = torch.minimum(energy_B, output_BN.square().sum(1)) <= QUIET**2
    share_B = (output_BN * original_BN).sum(1) / energy_B.clamp(min=QUIET**2)
    target_BN = share_B[:, None] * original_BN
    least = torch.finfo(energy_B.dtype).tiny
    signal_B, distortion_B = (
        part.square().sum(1).clamp(min=least) for part in (target_BN, output_BN - target_BN)
    )
    decibels_B = 10 * (signal_B.log10() - distortion_B.log10())
    return decibels_B.clamp(-MOST_DECIBELS, MOST_DECIBELS).masked_fill(silent_B, -MOST_DECIBELS)


@dataclass
class _Sounds:
    """Two batches of sounds (B, N) of the same lengths, silent beyond them."""

    a_BN: Tensor
    b_BN: Tensor
    lengths_B: Tensor

    def real_frames(self, hop: int, frames: int) -> Tensor:
        """(B, F): which frames begin within the sound."""
        return torch.arange(frames, device=self.lengths_B.device) * hop < self.lengths_B[:, None]

    def mean_over_frames_B(self, numbers_BF: Tensor, hop: int) -> Tensor:
        real_BF = self.real_frames(hop, numbers_BF.shape[1])
        return (numbers_BF * real_BF).sum(1) / real_BF.sum(1).clamp(min=1)

    def size_B(self, spectra_BKF: Tensor, hop: int) -> Tensor:
        return (
            (spectra_BKF * self.real_frames(hop, spectra_BKF.shape[2])[:, None])
            .flatten(1)
            .norm(dim=1)
        )

    def without_mean(self, sounds_BN: Tensor) -> Tensor:
        real_BN = self.real_frames(1, sounds_BN.shape[1])
        return (
            sounds_BN - sounds_BN.sum(1, keepdim=True) / self.lengths_B.clamp(min=1)[:, None]
        ) * real_BN


def _sounds(a: Tensor, b: Tensor, lengths_B: Tensor | None) -> _Sounds:
    if a.shape != b.shape or a.ndim != 3 or a.shape[1] != 1 or not a.shape[2]:
        raise ValueError(
            f"Sounds of shapes {tuple(a.shape)} and {tuple(b.shape)}: both must be the same (B, 1, N)."
        )
    if lengths_B is None:
        lengths_B = torch.full(a.shape[:1], a.shape[2], device=a.device)
    beyond_BN = torch.arange(a.shape[2], device=a.device) >= lengths_B.to(a.device)[:, None]
    a_BN, b_BN = (to_fp32(sound).squeeze(1).masked_fill(beyond_BN, 0) for sound in (a, b))
    return _Sounds(a_BN, b_BN, lengths_B.to(a.device))

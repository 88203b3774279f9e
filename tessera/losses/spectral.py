"""Spectral distances of audio.

Results that end in _B are per example: a loss is their mean, and a validation set may be split into
any batches. With `lengths_B` only the first samples of each example count, so that an example has
the same value alone and beside longer ones.

B examples, N samples, F frames, K frequencies or bands. Audio is (B, 1, N) in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.losses.spectrogram import MIN_MAGNITUDE, mel_spectrogram, stft
from tessera.nn.precision import to_fp32

MEL_WINDOWS = (32, 64, 128, 256, 512, 1024, 2048)
STFT_WINDOWS = (512, 1024, 2048)
BANDS_PER_SAMPLE = 5 / 32
"""Mel bands per sample of a window: 5 for 32, 320 for 2048, as in DAC."""


def mel_distance_B(
    a: Tensor,
    b: Tensor,
    *,
    rate_hz: int,
    lengths_B: Tensor | None = None,
    windows: Sequence[int] = MEL_WINDOWS,
) -> Tensor:
    """Return the mean absolute difference of log10 mel magnitudes over several windows, (B,).

    After DAC (Kumar 2023, arXiv 2306.06546, section 3.5), with other filters and with the mean over
    windows: DAC has their sum, which is seven times this.
    """
    pair = pair_audio(a, b, lengths_B)
    return torch.stack([_mel_distance_B(pair, window, rate_hz) for window in windows]).mean(0)


def _mel_distance_B(pair: AudioPair, window: int, rate_hz: int) -> Tensor:
    bands = max(1, round(window * BANDS_PER_SAMPLE))
    a, b = (
        mel_spectrogram(audio, rate_hz=rate_hz, window=window, hop=window // 4, bands=bands)
        .clamp(min=MIN_MAGNITUDE)
        .log10()
        for audio in (pair.a_BN, pair.b_BN)
    )
    return pair.frame_mean_B((a - b).abs().mean(1), hop=window // 4)


def stft_distance_B(
    a: Tensor, b: Tensor, *, lengths_B: Tensor | None = None, windows: Sequence[int] = STFT_WINDOWS
) -> Tensor:
    """Return spectral convergence plus log magnitude distance over several windows, (B,).

    After Parallel WaveGAN (Yamamoto 2020, arXiv 1910.11480, section 2.2). There the first term is
    relative to the original and unbounded where that is silent; here it is relative to both, and
    so between 0 and 1.
    """
    pair = pair_audio(a, b, lengths_B)
    return torch.stack([_stft_distance_B(pair, window) for window in windows]).mean(0)


def _stft_distance_B(pair: AudioPair, window: int) -> Tensor:
    hop = window // 4
    a, b = (
        stft(audio, window, hop).abs().clamp(min=MIN_MAGNITUDE) for audio in (pair.a_BN, pair.b_BN)
    )
    difference_B, norm_a_B, norm_b_B = (
        pair.frame_norm_B(magnitudes, hop) for magnitudes in (a - b, a, b)
    )
    convergence_B = difference_B / torch.hypot(norm_a_B, norm_b_B).clamp(min=MIN_MAGNITUDE)
    return convergence_B + pair.frame_mean_B((a.log() - b.log()).abs().mean(1), hop)


@dataclass
class AudioPair:
    """Two batches of audio, (B, N), of the same lengths, and zero beyond them."""

    a_BN: Tensor
    b_BN: Tensor
    lengths_B: Tensor

    def valid_frames(self, hop: int, frames: int) -> Tensor:
        """Return which frames begin within an example, (B, F)."""
        return torch.arange(frames, device=self.lengths_B.device) * hop < self.lengths_B[:, None]

    def frame_mean_B(self, values_BF: Tensor, hop: int) -> Tensor:
        """Return the mean over valid frames, (B,)."""
        valid_BF = self.valid_frames(hop, values_BF.shape[1])
        return (values_BF * valid_BF).sum(1) / valid_BF.sum(1).clamp(min=1)

    def frame_norm_B(self, spectra_BKF: Tensor, hop: int) -> Tensor:
        """Return the Frobenius norm over valid frames, (B,)."""
        return (
            (spectra_BKF * self.valid_frames(hop, spectra_BKF.shape[2])[:, None])
            .flatten(1)
            .norm(dim=1)
        )

    def remove_mean(self, audio_BN: Tensor) -> Tensor:
        """Subtract the mean of the valid samples, and keep zeros beyond them."""
        valid_BN = self.valid_frames(1, audio_BN.shape[1])
        return (
            audio_BN - audio_BN.sum(1, keepdim=True) / self.lengths_B.clamp(min=1)[:, None]
        ) * valid_BN


def pair_audio(a: Tensor, b: Tensor, lengths_B: Tensor | None) -> AudioPair:
    """Check two batches of audio, (B, 1, N), and set everything beyond their lengths to zero."""
    if a.shape != b.shape or a.ndim != 3 or a.shape[1] != 1 or not a.shape[2]:
        raise ValueError(
            f"Got audio of shapes {tuple(a.shape)} and {tuple(b.shape)}: both must have the same "
            "shape (B, 1, N). Mix down and trim them first."
        )
    if lengths_B is None:
        lengths_B = torch.full(a.shape[:1], a.shape[2], device=a.device)
    beyond_BN = torch.arange(a.shape[2], device=a.device) >= lengths_B.to(a.device)[:, None]
    a_BN, b_BN = (to_fp32(audio).squeeze(1).masked_fill(beyond_BN, 0) for audio in (a, b))
    return AudioPair(a_BN, b_BN, lengths_B.to(a.device))

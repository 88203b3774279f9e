"""Audio metrics: the scale-invariant signal-to-distortion ratio.

B examples, N samples. Audio is (B, 1, N).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.losses.spectral import pair_audio
from tessera.losses.spectrogram import MIN_MAGNITUDE
from tessera.metrics.image import MAX_DECIBELS


def si_sdr_B(output: Tensor, original: Tensor, *, lengths_B: Tensor | None = None) -> Tensor:
    """Return the scale-invariant signal-to-distortion ratio in decibels, from -100 to 100, (B,).

    After Le Roux 2018 (arXiv 1811.02508); the mean of both is removed first. Where either is silent
    nothing was reconstructed, and the value is -100: leave silent originals out of means. With
    `lengths_B` only the first samples of each example count.
    """
    pair = pair_audio(output, original, lengths_B)
    output_BN, original_BN = pair.remove_mean(pair.a_BN), pair.remove_mean(pair.b_BN)
    energy_B = original_BN.square().sum(1)
    silent_B = torch.minimum(energy_B, output_BN.square().sum(1)) <= MIN_MAGNITUDE**2
    scale_B = (output_BN * original_BN).sum(1) / energy_B.clamp(min=MIN_MAGNITUDE**2)
    target_BN = scale_B[:, None] * original_BN
    tiny = torch.finfo(energy_B.dtype).tiny
    signal_B, distortion_B = (
        part.square().sum(1).clamp(min=tiny) for part in (target_BN, output_BN - target_BN)
    )
    decibels_B = 10 * (signal_B.log10() - distortion_B.log10())
    return decibels_B.clamp(-MAX_DECIBELS, MAX_DECIBELS).masked_fill(silent_B, -MAX_DECIBELS)

"""Log-mel bands that are normalized over each recording: the input of networks for semantic tokens.

Each band has mean 0 and variance 1 over a recording, which removes loudness, the microphone and
some of the voice.

B batch, N samples, T frames of tokens, F mel frames, M mel bands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.losses.spectrogram import hz_to_mel, log_mel_spectrogram
from tessera.modalities.audio.features import num_frames
from tessera.modalities.audio.semantic import FrameTokenizer
from tessera.modalities.audio.tokenizer import check_audio_batch, check_not_empty
from tessera.nn.precision import full_precision

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig

WINDOW_SECONDS = 0.025
MEL_FRAMES_PER_TOKEN = 2
MIN_VARIANCE = 1e-2
"""Added to the variance of a band, so that silence stays small."""


@dataclass(frozen=True, kw_only=True)
class MelTokenizerConfig:
    """The input and the token rate of a semantic tokenizer that is trained on mel bands."""

    rate_hz: int = 16_000
    """Sampling rate of the audio."""
    token_rate_hz: float = 50.0
    """Tokens per second."""
    bands: int = 40
    """Number of mel bands."""

    def __post_init__(self) -> None:
        if self.bands < 1:
            raise ValueError(f"bands must be at least 1, got {self.bands}.")
        check_token_rate(self.rate_hz, self.token_rate_hz)

    @property
    def hop(self) -> int:
        """Samples per token."""
        return round(self.rate_hz / self.token_rate_hz)

    def validate_data(self, data: AudioDataConfig) -> None:
        data.check_mono("A semantic tokenizer")
        if data.length < self.hop:
            raise ValueError(
                f"Examples of {data.length} samples are shorter than one token of {self.hop} "
                "samples: use longer examples."
            )

    def fit_data(self, data: AudioDataConfig) -> Self:
        """Return the configuration at the rate of the data; the token rate stays the same."""
        return replace(self, rate_hz=data.rate_hz)

    def grid(self, data: AudioDataConfig) -> tuple[int, ...]:
        """Return the shape of the token grid of one example: (frames,)."""
        return (num_frames(data.length, self.hop),)


def check_token_rate(rate_hz: int, token_rate_hz: float) -> None:
    """Raise ValueError unless a token has a whole number of mel frames."""
    if not token_rate_hz > 0:
        raise ValueError(f"token_rate_hz must be above 0, got {token_rate_hz}.")
    samples = rate_hz / token_rate_hz
    if samples % MEL_FRAMES_PER_TOKEN:
        raise ValueError(
            f"{token_rate_hz:g} tokens per second at {rate_hz:,} Hz are {samples:g} samples per "
            f"token, which must be a multiple of {MEL_FRAMES_PER_TOKEN}: use another token_rate_hz."
        )


class MelTokenizer(FrameTokenizer):
    """A semantic tokenizer whose input are normalized mel bands.

    A subclass sets `to_states`, the layer that the bands are the input of.
    """

    config: MelTokenizerConfig
    to_states: nn.Linear

    def compute_mel(
        self, samples: Tensor, lengths_B: Tensor | None, warp_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return normalized log-mel bands (B, T, 2 M) and the mask (B, T) of real frames."""
        check_audio_batch(samples)
        check_not_empty(samples.shape[2])
        if lengths_B is None:
            lengths_B = torch.full(samples.shape[:1], samples.shape[2])
        lengths_B = lengths_B.to(samples.device)
        mask_BT = self.frame_mask(lengths_B, num_frames(samples.shape[2], self.hop))
        mel_BTM = normalized_mel(
            samples[:, 0],
            lengths_B,
            mask_BT,
            rate_hz=self.config.rate_hz,
            hop=self.hop,
            bands=self.config.bands,
            warp_B=warp_B,
        )
        return mel_BTM.to(self.to_states.weight.dtype), mask_BT


@torch.no_grad()
def normalized_mel(
    samples_BN: Tensor,
    lengths_B: Tensor,
    mask_BT: Tensor,
    *,
    rate_hz: int,
    hop: int,
    bands: int,
    warp_B: Tensor | None = None,
) -> Tensor:
    """Return the mel frames of each token, (B, T, 2 M).

    Args:
        samples_BN: samples, of which the first `lengths_B` are real.
        lengths_B: Number of real samples of each example.
        mask_BT: True for tokens with real samples.
        rate_hz: Sampling rate.
        hop: Samples per token.
        bands: Number of mel bands.
        warp_B: A factor by which the frequencies of each example are scaled.
    """
    frames, mel_hop = mask_BT.shape[1], hop // MEL_FRAMES_PER_TOKEN
    is_real = torch.arange(samples_BN.shape[1], device=samples_BN.device) < lengths_B[:, None]
    with full_precision(samples_BN.device.type):
        samples_BN = F.pad(samples_BN * is_real, (0, frames * hop - samples_BN.shape[1]))
        mel_BFM = log_mel_spectrogram(
            samples_BN,
            rate_hz=rate_hz,
            window=max(mel_hop, round(WINDOW_SECONDS * rate_hz)),
            hop=mel_hop,
            bands=bands,
        ).mT
        if warp_B is not None:
            mel_BFM = warp_frequencies(mel_BFM, warp_B, rate_hz)
        mel_BTM = mel_BFM.unflatten(1, (frames, MEL_FRAMES_PER_TOKEN))
        mask_BT11 = mask_BT[..., None, None]
        count_B = MEL_FRAMES_PER_TOKEN * mask_BT.sum(1).clamp_min(1)[:, None, None, None]
        mean = (mel_BTM * mask_BT11).sum((1, 2), keepdim=True) / count_B
        centred = (mel_BTM - mean) * mask_BT11
        variance = centred.square().sum((1, 2), keepdim=True) / count_B
        return (centred / (variance + MIN_VARIANCE).sqrt()).flatten(2)


def warp_frequencies(mel_BFM: Tensor, factor_B: Tensor, rate_hz: int) -> Tensor:
    """Scale the frequencies of mel bands by a factor, by linear interpolation between bands.

    Beyond the lowest and the highest band these are repeated.
    """
    bands = mel_BFM.shape[2]
    spacing = hz_to_mel(rate_hz / 2) / (bands + 1)
    band_M = torch.arange(bands, device=mel_BFM.device, dtype=mel_BFM.dtype)
    hz_M = 700 * (10 ** ((band_M + 1) * spacing / 2595) - 1)
    source_hz_BM = hz_M / factor_B.to(hz_M)[:, None]
    source_BM = 2595 * (1 + source_hz_BM / 700).log10() / spacing - 1
    distance_BMM = (source_BM.clamp(0, bands - 1)[:, None] - band_M[:, None]).abs()
    return mel_BFM @ (1 - distance_BMM).clamp_min(0)

"""A codec network that works on MDCT coefficients, at the rate of the frames.

The samples are transformed by an MDCT, which is exactly invertible, and all layers compute at 50 to
100 frames per second instead of thousands of samples per second (MDCTCodec, Jiang 2024, arXiv
2411.00464; Vocos, Siuzdak 2023, 2306.00814, decodes in the same way). The layers are causal
ConvNeXt blocks (Liu 2022, 2201.03545): a depthwise convolution over frames, a norm and a
position-wise network, added to their input.

The level of speech in a band of frequencies varies by a factor of thousands, and words and voices
depend on it. Beside the coefficients, the encoder therefore gets the logarithm of the energy in
bands, and the decoder predicts a shape of the coefficients and the logarithm of a gain for each
band (gain-shape coding, as in CELT, Valin 2010, IEEE Transactions on Audio, Speech, and Language
Processing 18(1)). After 90 CPU seconds on telephone prompts, STOI was 0.76 without both, 0.80 with
the levels alone, and 0.85 with both and fewer windows in the loss.

B batch, T frames, C channels, R rows (examples times channels), M MDCT frames, h coefficients of an
MDCT frame, W samples of its window, K bands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.modalities.audio.causal_conv import CausalConv1d
from tessera.modalities.audio.codec import AudioCodecConfig
from tessera.modalities.audio.mdct import MDCT, InverseMDCT, mdst_basis
from tessera.nn.causal_conv import StreamingSequential, StreamingState
from tessera.nn.init import init_fan_in_, zero_init_
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.transformer import linear

INPUT_GAIN = 10.0
"""Coefficients of speech have a root mean square of about 0.1, and layers are built for 1."""
FREQUENCY_WARP = 16
"""Frequencies are warped by log(1 + 16 f), where f is relative to the highest: evenly spaced up to
a sixteenth of it, 500 Hz at a sampling rate of 16 kHz, and logarithmic above, about as in mel."""
MIN_ENERGY, LEVEL_SCALE, LEVEL_OFFSET = 1e-7, 0.3, 2.0
"""Levels are LEVEL_SCALE log(energy + MIN_ENERGY) + LEVEL_OFFSET, between about -3 and 3."""
MAX_LOG_GAIN = 8.0
"""The limit of the logarithm of a gain, which bounds what a large latent can produce."""


@dataclass(frozen=True, kw_only=True)
class SpectralCodecConfig(AudioCodecConfig):
    mdct_hop: int = 160
    """Samples per MDCT frame, half of its window. The decoder is late by this many samples."""
    stack: int = 2
    """MDCT frames per frame of tokens."""
    dim: int = 256
    """Channels of all layers."""
    encoder_depth: int = 3
    """Number of blocks of the encoder."""
    decoder_depth: int = 5
    """Number of blocks of the decoder."""
    kernel_size: int = 7
    """Frames of the convolution of a block."""
    expansion: int = 3
    """Width of the hidden layer of a block, as a multiple of `dim`."""
    bands: int = 40
    """Bands of frequencies: the encoder gets the level of each, and the decoder predicts it."""
    tilt: float = 1.0
    """Exponent of the pre-emphasis: the encoder gets coefficients that are amplified by
    (1 + 16 f)^tilt, where f is their frequency relative to the highest, and the output of the
    decoder is divided by the same. Without it, 0, high frequencies, which are a hundred times
    weaker in speech, are hardly learned in a short run."""

    def __post_init__(self) -> None:
        for name in ("mdct_hop", "stack", "dim", "kernel_size", "expansion", "bands"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but got {getattr(self, name)}.")
        for name in ("encoder_depth", "decoder_depth", "tilt"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, but got {getattr(self, name)}.")

    @property
    def hop(self) -> int:
        return self.mdct_hop * self.stack

    @property
    def latent_dim(self) -> int:
        return self.dim

    @property
    def delay(self) -> int:
        return self.mdct_hop

    def emphasis(self) -> Tensor:
        """Return the factors of the coefficients of an MDCT frame, (h,)."""
        return INPUT_GAIN * (1 + FREQUENCY_WARP * relative_frequencies(self.mdct_hop)) ** self.tilt

    def build_encoder(self) -> StreamingSequential:
        return StreamingSequential(
            SpectralInput(self),
            FrameLinear(self.channels * (self.hop + self.stack * self.bands), self.dim),
            *[ConvNeXtBlock(self) for _ in range(self.encoder_depth)],
        )

    def build_decoder(self) -> StreamingSequential:
        return StreamingSequential(
            *[ConvNeXtBlock(self) for _ in range(self.decoder_depth)],
            GainShapeLinear(self),
            InverseMDCT(self.mdct_hop, self.stack, self.channels),
        )


def relative_frequencies(bins: int) -> Tensor:
    """Return the frequencies of the coefficients of an MDCT frame, relative to the highest."""
    return (torch.arange(bins) + 0.5) / bins


def band_weights(bins: int, bands: int) -> Tensor:
    """Return how much of each coefficient belongs to each band, (h, K); each row adds up to 1.

    The bands are evenly spaced in warped frequency, and a coefficient between two of them belongs
    to both, by its distance. Where bands are narrower than coefficients, some are empty.
    """
    warped_h = torch.log1p(FREQUENCY_WARP * relative_frequencies(bins))
    position_h = warped_h * (bands - 1) / math.log1p(FREQUENCY_WARP)
    return (1 - (position_h[:, None] - torch.arange(bands)).abs()).clamp_min(0)


class SpectralInput(MDCT):
    """From samples (B, N, C) to coefficients and levels, (B, T, C * stack * (h + K))."""

    emphasis_h: Tensor
    mdst: Tensor
    weights_hK: Tensor

    def __init__(self, config: SpectralCodecConfig):
        super().__init__(config.mdct_hop, config.stack, config.channels)
        self.register_buffer("emphasis_h", config.emphasis(), persistent=False)
        self.register_buffer("mdst", mdst_basis(self.hop).float(), persistent=False)
        self.register_buffer("weights_hK", band_weights(self.hop, config.bands), persistent=False)

    def forward(self, x_BNC: Tensor, stream: StreamingState) -> Tensor:
        windows_RMW = self.split_windows(x_BNC, stream)
        with full_precision(windows_RMW.device.type):
            cosines_RMh, sines_RMh = windows_RMW @ self.basis, windows_RMW @ self.mdst
            energy_RMK = (cosines_RMh.square() + sines_RMh.square()) @ self.weights_hK
        levels_RMK = LEVEL_SCALE * (energy_RMK + MIN_ENERGY).log() + LEVEL_OFFSET
        coefficients_RMh = cosines_RMh * self.emphasis_h
        return torch.cat([self.join_frames(coefficients_RMh), self.join_frames(levels_RMK)], dim=2)


class GainShapeLinear(nn.Module):
    """From states (B, T, dim) to coefficients (B, T, C * stack * h).

    A coefficient is a linear function of the state, its shape, times the exponential of another
    one, the gain of its bands. All gains are 1 at initialization.
    """

    inverse_emphasis_h: Tensor
    weights_hK: Tensor

    def __init__(self, config: SpectralCodecConfig):
        super().__init__()
        self.mdct_frames = config.channels * config.stack
        self.shape = FrameLinear(config.dim, self.mdct_frames * config.mdct_hop)
        self.log_gain = zero_init_(FrameLinear(config.dim, self.mdct_frames * config.bands))
        self.register_buffer("inverse_emphasis_h", 1 / config.emphasis(), persistent=False)
        weights_hK = band_weights(config.mdct_hop, config.bands)
        self.register_buffer("weights_hK", weights_hK, persistent=False)

    @property
    def weight(self) -> nn.Parameter:
        return self.shape.weight  # type: ignore[return-value]

    def forward(self, x_BTC: Tensor, stream: StreamingState) -> Tensor:
        shape_BTMh = to_fp32(self.shape(x_BTC, stream)).unflatten(2, (self.mdct_frames, -1))
        log_gain_BTMK = to_fp32(self.log_gain(x_BTC, stream)).unflatten(2, (self.mdct_frames, -1))
        with full_precision(x_BTC.device.type):
            log_gain_BTMh = log_gain_BTMK @ self.weights_hK.mT
        gain_BTMh = log_gain_BTMh.clamp(-MAX_LOG_GAIN, MAX_LOG_GAIN).exp()
        return (shape_BTMh * gain_BTMh * self.inverse_emphasis_h).flatten(2)


class FrameLinear(nn.Linear):
    """A linear layer on each frame."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels)
        init_fan_in_(self, gain=1.0)

    def forward(self, x_BTC: Tensor, stream: StreamingState) -> Tensor:  # type: ignore[override]
        return super().forward(x_BTC)


class ConvNeXtBlock(nn.Module):
    """x + f(x), where f is a depthwise causal convolution, a norm and a two-layer network.

    The norm is inside of the branch, so that loudness passes through; f is zero at initialization.
    """

    is_block = True

    def __init__(self, config: SpectralCodecConfig):
        super().__init__()
        dim, hidden = config.dim, config.expansion * config.dim
        self.conv = CausalConv1d(dim, dim, config.kernel_size, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up = linear(dim, hidden)
        self.down = zero_init_(linear(hidden, dim))

    def forward(self, x_BTC: Tensor, stream: StreamingState) -> Tensor:
        hidden_BTC = self.norm(self.conv(x_BTC, stream))
        return x_BTC + self.down(F.gelu(self.up(hidden_BTC)))

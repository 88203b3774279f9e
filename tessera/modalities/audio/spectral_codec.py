"""A codec network that works on MDCT coefficients, at the rate of the frames.

The samples are transformed by an MDCT, which is exactly invertible, and all layers compute at 50 to
100 frames per second instead of thousands of samples per second (MDCTCodec, Jiang 2024, arXiv
2411.00464; Vocos, Siuzdak 2023, 2306.00814, decodes in the same way). The layers are causal
ConvNeXt blocks (Liu 2022, 2201.03545): a depthwise convolution over frames, a norm and a
position-wise network, added to their input.

B batch, T frames, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.modalities.audio.causal_conv import CausalConv1d
from tessera.modalities.audio.codec import AudioCodecConfig
from tessera.modalities.audio.mdct import MDCT, InverseMDCT
from tessera.nn.causal_conv import StreamingSequential, StreamingState
from tessera.nn.init import init_fan_in_, zero_init_
from tessera.nn.transformer import linear

INPUT_GAIN = 10.0
"""Coefficients of speech have a root mean square of about 0.1, and layers are built for 1."""


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
    tilt: float = 1.0
    """Exponent of the pre-emphasis: the encoder gets coefficients that are amplified by
    (1 + 16 f)^tilt, where f is their frequency relative to the highest, and the output of the
    decoder is divided by the same. Without it, 0, high frequencies, which are a hundred times
    weaker in speech, are hardly learned in a short run."""

    def __post_init__(self) -> None:
        for name in ("mdct_hop", "stack", "dim", "kernel_size", "expansion"):
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
        """Return the factors of the coefficients of one frame, of all channels."""
        frequencies = (torch.arange(self.mdct_hop) + 0.5) / self.mdct_hop
        return (INPUT_GAIN * (1 + 16 * frequencies) ** self.tilt).repeat(self.channels * self.stack)

    def build_encoder(self) -> StreamingSequential:
        return StreamingSequential(
            MDCT(self.mdct_hop, self.stack, self.channels),
            Emphasis(self.emphasis()),
            FrameLinear(self.channels * self.hop, self.dim),
            *[ConvNeXtBlock(self) for _ in range(self.encoder_depth)],
        )

    def build_decoder(self) -> StreamingSequential:
        return StreamingSequential(
            *[ConvNeXtBlock(self) for _ in range(self.decoder_depth)],
            FrameLinear(self.dim, self.channels * self.hop),
            Emphasis(1 / self.emphasis()),
            InverseMDCT(self.mdct_hop, self.stack, self.channels),
        )


class Emphasis(nn.Module):
    """Multiply each coefficient of a frame by a constant."""

    factors_C: Tensor

    def __init__(self, factors_C: Tensor):
        super().__init__()
        self.register_buffer("factors_C", factors_C, persistent=False)

    def forward(self, x_BTC: Tensor, stream: StreamingState) -> Tensor:
        return x_BTC * self.factors_C


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

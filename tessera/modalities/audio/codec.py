"""A codec: sound as a few symbols for each short frame, and back (SoundStream, Zeghidour 2021,
arXiv 2107.03312, with DAC's lessons, Kumar 2023, 2306.06546).

A convolutional encoder makes one vector of every `hop` samples, a residual quantizer names it in
`levels` symbols, each of which says what those before it left over, and a decoder rebuilds the
samples. Any first few levels can be decoded by themselves, the better the more there are. Nothing
looks ahead of its own frame, so padding at the end changes nothing before it, and sounds of any
length pass in pieces (`encode_chunks`, `decode_chunks`).

Sounds are (B, 1, N) in [-1, 1], in one channel; codes are (B, T, L) with T = N / hop, rounded up:
the last frame is filled with silence. Inside, sounds are (B, T, C) as clips are (B, T, H, W, C),
and for the same reason: a convolution of 7 samples and 16 channels over 2 seconds, forward and
backward, took 5 ms so and 11 ms with the channels first.

B batch, N samples, T frames (or samples, on the way), C channels, L levels, D width of the latent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.modalities.audio.tokenizer import AudioTokenizer, refuse_no_sounds, refuse_nothing
from tessera.modalities.image.vqgan import Reconstruction
from tessera.nn.causal_conv import Chain, StreamingState
from tessera.nn.init import start
from tessera.nn.precision import to_fp32
from tessera.nn.quantize import (
    GroupedConfig,
    GroupedQuantizer,
    ResidualConfig,
    ResidualQuantizer,
    VQConfig,
)
from tessera.nn.transformer import linear, zero_init_


def levels_of_sound() -> ResidualConfig:
    return ResidualConfig(quantizer=VQConfig(code_dim=32), levels=8, dropout=0.5)


@dataclass(frozen=True, kw_only=True)
class AudioCodecConfig:
    dim: int = 32
    """Width at the rate of the samples; it doubles with each stage, up to `max_channels`."""
    max_channels: int = 512
    strides: tuple[int, ...] = (2, 4, 5, 8)
    """One stage each, from the samples inwards: how many become one. Their product, `hop`, is what
    one frame stands for."""
    dilations: tuple[int, ...] = (1, 3, 9)
    """Each stage has a residual block for each of these: it looks at seven places, so far apart."""
    bare: int = 0
    """Stages without residual blocks, counted from the samples inwards: with 1 a step took 116 ms
    instead of 171 (dim 16, widest 128, strides 4 4 4 5, a second of sound at 16 kHz)."""
    activation: Literal["snake", "elu"] = "snake"
    """Snake has a period of its own in every channel, as sounds have; ELU is cheaper."""
    quantizer: ResidualConfig | GroupedConfig = field(default_factory=levels_of_sound)

    def __post_init__(self) -> None:
        for name in ("dim", "widest"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"Every layer of a codec has at least 1 channel, but {name} is {getattr(self, name)}."
                )
        if not self.strides or min(self.strides) < 1:
            raise ValueError(
                f"The strides say how many samples become one, stage by stage, but they are {self.strides}: give one or more "
                "whole numbers of 1 or more, such as 2 4 5 8."
            )
        if any(dilation < 1 for dilation in self.dilations):
            raise ValueError(
                f"A block looks at places 1 or more apart, but dilations are {self.dilations}: use 1 3 9, say."
            )
        if not 0 <= self.bare <= len(self.strides):
            raise ValueError(
                f"Of {len(self.strides)} stages, {self.bare} cannot be bare: use 0 to {len(self.strides)}."
            )

    @property
    def hop(self) -> int:
        """Samples that one frame stands for."""
        return math.prod(self.strides)

    @property
    def stage_channels(self) -> list[int]:
        """Channels at the rate of the samples and after each stage."""
        return [
            min(self.dim * 2**stage, self.max_channels) for stage in range(len(self.strides) + 1)
        ]

    def validate_data(self, data: Any) -> None:
        """Refuses data whose sounds this network cannot take."""
        refuse_nothing(data.length)
        if data.length < self.hop:
            raise ValueError(
                f"Sounds of {data.length} samples do not fill one frame: this codec makes one of every {self.hop} samples "
                f"(the product of its strides). Use longer sounds or smaller strides."
            )

    def grid(self, data: Any) -> tuple[int, ...]:
        """How many frames such sounds become."""
        return (self.frames(data.length),)

    def frames(self, samples: int) -> int:
        """Of so many samples; the last may be filled in part."""
        return -(-samples // self.hop)

    def build(self) -> AudioCodec:
        return AudioCodec(self)


class AudioCodec(AudioTokenizer):
    def __init__(self, config: AudioCodecConfig):
        super().__init__()
        self.config = config
        self.encoder = encoder(config)
        self.quantizer: ResidualQuantizer | GroupedQuantizer = config.quantizer.build(
            config.stage_channels[-1]
        )
        # Sounds differ in length, so a mean over their frames is only exact once all micro-batches
        # have been counted.
        self.quantizer.needs_global_stats = True
        self.decoder = decoder(config)
        self.to(memory_format=torch.channels_last)

    @property
    def last_layer(self) -> nn.Parameter:
        """Where the strengths of two losses are compared (Esser 2021, arXiv 2012.09841, eq. 7)."""
        return self.decoder[-1].weight  # type: ignore[return-value]

    def forward(
        self,
        samples: Tensor,
        lengths_B: Tensor | None = None,
        *,
        num_quantizers_B: Tensor | None = None,
    ) -> Reconstruction:
        """`lengths` says how many samples of each sound are real: the quantizer neither learns from
        the others nor counts them.

        Example b is written in its first `num_quantizers_B[b]` levels only (quantizer dropout): see
        `quantizer.num_quantizers_to_keep`.
        """
        latent_BTD = self.latent(samples)
        mask_BT = (
            None
            if lengths_B is None
            else self.real(lengths_B.to(latent_BTD.device), latent_BTD.shape[1])
        )
        quantized = self.quantizer(latent_BTD, mask_BT, num_quantizers_B=num_quantizers_B)
        rebuilt = self.sound(quantized.latent)[..., : samples.shape[-1]]
        return Reconstruction(rebuilt, ended(quantized.codes, mask_BT), quantized.penalties)

    def encode(self, samples: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Sounds (B, 1, N) to symbols (B, T, L), and -1 after the end of a sound that is shorter
        than the batch."""
        latent_BTD = self.latent(samples)
        mask_BT = (
            None
            if lengths_B is None
            else self.real(lengths_B.to(latent_BTD.device), latent_BTD.shape[1])
        )
        return ended(self.quantizer(latent_BTD, mask_BT).codes, mask_BT)

    def decode(self, codes: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """Symbols (B, T, L), or only the first few levels of them, to sounds (B, 1, T hop); of
        sound b, `num_quantizers_B[b]` levels.

        Where symbols have ended (-1) there is nothing at all: zeros.
        """
        self.refuse_codes(codes)
        real_BT = codes[..., 0] >= 0
        sound_B1N = self.sound(
            self.quantizer.decode(codes.clamp_min(0), num_quantizers_B=num_quantizers_B)
            * real_BT[..., None]
        )
        return sound_B1N * real_BT.repeat_interleave(self.hop, dim=1)[:, None]

    def batch_stats(
        self,
        samples: Tensor,
        lengths_B: Tensor | None = None,
        *,
        num_quantizers_B: Tensor | None = None,
    ) -> Tensor:
        """These sounds' share of what the quantizer expects; see `Quantizer.batch_stats`."""
        latent_BTD = self.latent(samples)
        mask_BT = (
            None
            if lengths_B is None
            else self.real(lengths_B.to(latent_BTD.device), latent_BTD.shape[1])
        )
        return self.quantizer.batch_stats(latent_BTD, mask_BT, num_quantizers_B=num_quantizers_B)

    # ---- sounds of any length

    @torch.no_grad()
    def encode_chunks(self, sounds: Iterable[Tensor]) -> Iterator[Tensor]:
        """A sound in pieces (B, 1, n_i) of any lengths, to the codes of the whole in pieces, as
        soon as each frame is full.

        Only what the layers look back on stays in memory. After the last piece an unfinished frame
        is filled with silence.
        """
        passage, samples, like = StreamingState(memory={}), 0, None
        for piece in sounds:
            new_BT1 = self.heard(piece)
            refuse_mixture(len(piece), like)
            like, samples = len(piece), samples + new_BT1.shape[1]
            yield from self.written(new_BT1, passage)
        refuse_nothing(samples)
        if missing := -samples % self.hop:
            yield from self.written(new_BT1.new_zeros(len(new_BT1), missing, 1), passage)

    def written(self, new_BT1: Tensor, passage: StreamingState) -> Iterator[Tensor]:
        """The codes of the frames that these samples have filled, if any."""
        latent_BTD = self.encoder(new_BT1, passage)
        if latent_BTD.shape[1]:
            yield self.quantizer(latent_BTD).codes

    @torch.no_grad()
    def decode_chunks(self, codes: Iterable[Tensor]) -> Iterator[Tensor]:
        """Codes in pieces (B, t_i, L) of any lengths, to the sound in pieces (B, 1, t_i hop)."""
        passage, like = StreamingState(memory={}), None
        for piece in codes:
            self.refuse_codes(piece)
            refuse_mixture(len(piece), like)
            like = len(piece)
            yield played(self.decoder(self.quantizer.decode(piece), passage))

    # ---- halves of the way

    def latent(self, samples: Tensor) -> Tensor:
        """(B, 1, N) -> (B, T, D), before quantization."""
        heard_BT1 = self.heard(samples)
        refuse_nothing(heard_BT1.shape[1])
        return self.encoder(
            F.pad(heard_BT1, (0, 0, 0, -heard_BT1.shape[1] % self.hop)), StreamingState()
        )

    def sound(self, latent_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (B, 1, T hop)."""
        return played(self.decoder(latent_BTD, StreamingState()))

    def heard(self, samples: Tensor) -> Tensor:
        """Laid out as the layers take them: (B, N, 1)."""
        refuse_no_sounds(samples)
        return samples.mT


def ended(codes_BTL: Tensor, mask_BT: Tensor | None) -> Tensor:
    """-1 where a sound has ended."""
    return codes_BTL if mask_BT is None else codes_BTL.masked_fill(~mask_BT[..., None], -1)


def refuse_mixture(batch: int, like: int | None) -> None:
    if like not in (None, batch):
        raise ValueError(
            f"A piece of {batch} sounds came after one of {like}: pieces of a batch hold as many sounds each."
        )


def played(samples_BT1: Tensor) -> Tensor:
    return to_fp32(samples_BT1.mT.contiguous())


# ---------------------------------------------------------------------------------------------------------- the layers


# Nothing is normed, and loudness passes through. Of two made-up clips of half a second, 100 steps
# without a quantizer made 16.7 dB SI-SDR (three seeds: 16.3, 16.9, 17.0), and with weight norm,
# which SoundStream and DAC have, 16.9 (17.4, 16.2, 17.0). With a layer norm of each latent it was
# 7.3 (one seed).


def encoder(config: AudioCodecConfig) -> Chain:
    channels = config.stage_channels
    layers: list[nn.Module] = [AudioConv(1, channels[0], 7)]
    for stage, stride in enumerate(config.strides):
        layers += blocks(stage, config)
        layers += [
            activation(channels[stage], config),
            AudioConv(channels[stage], channels[stage + 1], 2 * stride, stride=stride),
        ]
    return Chain(
        *layers, activation(channels[-1], config), AudioConv(channels[-1], channels[-1], 3)
    )


def decoder(config: AudioCodecConfig) -> Chain:
    channels = config.stage_channels
    layers: list[nn.Module] = [AudioConv(channels[-1], channels[-1], 7)]
    for stage, stride in reversed(list(enumerate(config.strides))):
        layers += [
            activation(channels[stage + 1], config),
            Spread(channels[stage + 1], channels[stage], stride),
        ]
        layers += blocks(stage, config)
    return Chain(*layers, activation(channels[0], config), AudioConv(channels[0], 1, 7))


def blocks(stage: int, config: AudioCodecConfig) -> list[nn.Module]:
    dilations = config.dilations if stage >= config.bare else ()
    return [Residual(config.stage_channels[stage], dilation, config) for dilation in dilations]


class AudioConv(nn.Module):
    """A convolution over time whose kernel ends at the last sample of the frame it speaks of.
    Before the first is silence."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, dilation: int = 1, stride: int = 1
    ):
        super().__init__()
        self.reach, self.stride = (kernel - 1) * dilation + 1, stride
        # Two-dimensional, of height 1: torch has no layout with the channels last for one
        # dimension.
        self.convolution = nn.Conv2d(
            inputs, outputs, (1, kernel), stride=(1, stride), dilation=(1, dilation)
        )
        start(self.convolution, gain=1.0)

    @property
    def weight(self) -> nn.Parameter:
        return self.convolution.weight  # type: ignore[return-value]

    def forward(self, x_BTC: Tensor, passage: StreamingState) -> Tensor:
        seen = self.with_past(x_BTC, passage)
        ready = max(0, (seen.shape[1] - self.reach) // self.stride + 1)
        passage.keep(self, seen[:, ready * self.stride :])
        return self.convolution(seen.mT.unsqueeze(2)).squeeze(2).mT if ready else seen[:, :0]

    def with_past(self, x_BTC: Tensor, passage: StreamingState) -> Tensor:
        past = passage.recall(self)
        if past is None:
            return F.pad(x_BTC, (0, 0, self.reach - self.stride, 0))
        return torch.cat([past, x_BTC], dim=1)


class Spread(nn.Module):
    """Each frame becomes `stride` frames, out of itself and the one before: a transposed
    convolution of twice the stride."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.stride = stride
        self.convolution = AudioConv(inputs, stride * outputs, 2)

    def forward(self, x_BTC: Tensor, passage: StreamingState) -> Tensor:
        return self.convolution(x_BTC, passage).unflatten(-1, (self.stride, -1)).flatten(1, 2)


class Residual(nn.Module):
    """x + f(x), where f looks at seven places, the last of them its own, and starts as nothing."""

    def __init__(self, width: int, dilation: int, config: AudioCodecConfig):
        super().__init__()
        self.before, self.between = activation(width, config), activation(width, config)
        self.convolution = AudioConv(width, width, 7, dilation=dilation)
        self.out = zero_init_(linear(width, width))

    def forward(self, x_BTC: Tensor, passage: StreamingState) -> Tensor:
        around = self.convolution(self.before(x_BTC, passage), passage)
        return x_BTC + self.out(self.between(around, passage))


def activation(width: int, config: AudioCodecConfig) -> nn.Module:
    return Snake(width) if config.activation == "snake" else Elu()


class Snake(nn.Module):
    """x + sin^2(a x) / a, with a frequency `a` for each channel (Ziyin 2020, arXiv 2006.08195).

    What is learnt is its logarithm, so that no step takes it to zero, by which is divided, or
    beyond.
    """

    def __init__(self, width: int):
        super().__init__()
        self.log_frequency = nn.Parameter(torch.zeros(width))

    def forward(self, x_BTC: Tensor, passage: StreamingState) -> Tensor:
        frequency = self.log_frequency.exp().to(x_BTC.dtype)
        return torch.addcdiv(x_BTC, torch.sin(frequency * x_BTC).square(), frequency)


class Elu(nn.ELU):
    def forward(self, x_BTC: Tensor, passage: StreamingState) -> Tensor:
        return super().forward(x_BTC)

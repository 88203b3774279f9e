"""A neural audio codec: audio to a few tokens per short frame, and back.

An encoder computes one vector for every `hop` samples, a residual quantizer turns it into
`num_quantizers` codes, each of which encodes the residual of those before it, and a decoder
reconstructs the samples (SoundStream, Zeghidour 2021, arXiv 2107.03312). The first k codebooks can
be decoded alone, with a quality that increases with k. The networks are in `soundstream` and
`spectral_codec`. All layers are causal, so padding at the end changes nothing before it, and audio
of any length can be processed in chunks (`encode_chunks`, `decode_chunks`).

Audio is (B, C, N) in [-1, 1]; codes are (B, T, L) with T = N / hop, rounded up, where the last
frame is padded with zeros. Hidden states have the channels last. Of stereo the networks get mid and
side, half of the sum and of the difference of left and right (Johnston 1992, "Sum-difference stereo
transform coding"): what both channels have in common is then described once.

B batch, N samples, T frames, C channels of the audio, L codebooks, D latent dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.modalities.audio.tokenizer import AudioTokenizer, check_audio_batch, check_not_empty
from tessera.nn.causal_conv import StreamingSequential, StreamingState
from tessera.nn.precision import to_fp32
from tessera.nn.quantize import (
    GroupedQuantizer,
    MultiCodeQuantizerConfig,
    ResidualConfig,
    ResidualQuantizer,
    VQConfig,
)
from tessera.nn.reconstruction import Reconstruction

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig


def default_quantizer() -> ResidualConfig:
    return ResidualConfig(quantizer=VQConfig(code_dim=32), num_quantizers=8, dropout=0.5)


@dataclass(frozen=True, kw_only=True)
class AudioCodecConfig:
    """Base class of the networks of a codec: the frames, and an encoder and a decoder to build."""

    quantizer: MultiCodeQuantizerConfig = field(default_factory=default_quantizer)
    """The quantizer of the latents."""
    channels: int = 1
    """Channels of the audio: those of the data (`--data.channels`)."""

    @property
    def hop(self) -> int:
        """Samples per frame."""
        raise NotImplementedError

    @property
    def latent_dim(self) -> int:
        """Channels of the encoder's output and of the decoder's input."""
        raise NotImplementedError

    @property
    def delay(self) -> int:
        """Samples by which the decoder's output is late: it needs this much of the next frames."""
        return 0

    def build_encoder(self) -> StreamingSequential:
        """Build the network from (B, N, C) to (B, N / hop, latent_dim)."""
        raise NotImplementedError

    def build_decoder(self) -> StreamingSequential:
        """Build the network from (B, T, latent_dim) to (B, T * hop, C), late by `delay`."""
        raise NotImplementedError

    def validate_data(self, data: AudioDataConfig) -> None:
        """Raise ValueError if the examples are shorter than one frame, or have other channels."""
        if data.channels != self.channels:
            raise ValueError(
                f"The audio has {data.channels} channel(s), but the model has {self.channels}: set "
                "--data.channels, which sets both."
            )
        check_not_empty(data.length)
        if data.length < self.hop:
            raise ValueError(
                f"Examples of {data.length} samples are shorter than one frame of {self.hop} "
                "samples: use longer examples or shorter frames."
            )

    def fit_data(self, data: AudioDataConfig) -> Self:
        """Return the configuration with the channels of the audio."""
        return replace(self, channels=data.channels)

    def grid(self, data: AudioDataConfig) -> tuple[int, ...]:
        """Return the shape of the token grid of one example: (frames,)."""
        return (self.num_frames(data.length),)

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames, including a partly filled last one."""
        return -(-num_samples // self.hop)

    def build(self) -> AudioCodec:
        return AudioCodec(self)


class AudioCodec(AudioTokenizer):
    config: AudioCodecConfig

    def __init__(self, config: AudioCodecConfig):
        super().__init__()
        self.config = config
        self.encoder = config.build_encoder()
        self.quantizer: ResidualQuantizer | GroupedQuantizer = config.quantizer.build(
            config.latent_dim
        )
        # Examples differ in length, so a mean over their frames is exact only with the statistics
        # of all micro-batches.
        self.quantizer.needs_global_stats = True
        self.decoder = config.build_decoder()
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def last_layer(self) -> nn.Parameter:
        """The weight at which gradient norms of two losses are compared (Esser 2021, arXiv
        2012.09841, eq. 7)."""
        weights = [
            weight
            for layer in self.decoder
            if isinstance(weight := getattr(layer, "weight", None), nn.Parameter)
        ]
        return weights[-1]

    def forward(
        self,
        samples: Tensor,
        lengths_B: Tensor | None = None,
        *,
        num_quantizers_B: Tensor | None = None,
    ) -> Reconstruction:
        """Reconstruct a batch.

        Args:
            samples: (B, C, N).
            lengths_B: Number of real samples of each example. Padding does not enter the
                quantizer's losses and statistics.
            num_quantizers_B: Number of quantizers used for each example (quantizer dropout), see
                `quantizer.sample_num_quantizers`.
        """
        latent_BTD = self.encode_latent(samples)
        mask_BT = self.latent_mask(latent_BTD, lengths_B)
        quantized = self.quantizer(latent_BTD, mask_BT, num_quantizers_B=num_quantizers_B)
        output = self.decode_latent(quantized.latent)[..., : samples.shape[-1]]
        return Reconstruction(output, mask_codes(quantized.codes, mask_BT), quantized.penalties)

    def encode(self, samples: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Encode (B, C, N) as codes (B, T, L), with -1 in frames of padding."""
        latent_BTD = self.encode_latent(samples)
        mask_BT = self.latent_mask(latent_BTD, lengths_B)
        return mask_codes(self.quantizer(latent_BTD, mask_BT).codes, mask_BT)

    def decode(self, codes: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """Decode (B, T, L) to audio (B, C, T * hop), with zeros in frames of code -1.

        L may be less than the number of quantizers; of example b, the first `num_quantizers_B[b]`
        codebooks are used.
        """
        self.check_codes(codes)
        mask_BT = codes[..., 0] >= 0
        latent_BTD = self.quantizer.decode(codes.clamp_min(0), num_quantizers_B=num_quantizers_B)
        audio_BCN = self.decode_latent(latent_BTD * mask_BT[..., None])
        return audio_BCN * mask_BT.repeat_interleave(self.hop, dim=1)[:, None]

    def batch_stats(
        self,
        samples: Tensor,
        lengths_B: Tensor | None = None,
        *,
        num_quantizers_B: Tensor | None = None,
    ) -> Tensor:
        """Return this batch's part of the global statistics; see `Quantizer.batch_stats`."""
        latent_BTD = self.encode_latent(samples)
        mask_BT = self.latent_mask(latent_BTD, lengths_B)
        return self.quantizer.batch_stats(latent_BTD, mask_BT, num_quantizers_B=num_quantizers_B)

    # ---- streaming

    @torch.no_grad()
    def encode_chunks(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Encode audio that arrives in chunks (B, C, n_i) of any lengths.

        Yields codes (B, t_i, L) as soon as frames are complete; together they equal the codes of
        the whole. Memory use is constant. After the last chunk, an incomplete frame is padded with
        zeros.
        """
        stream, num_samples, batch_size = StreamingState(memory={}), 0, None
        for chunk in chunks:
            x_BNC = self.to_channels_last(chunk)
            check_same_batch(len(chunk), batch_size)
            batch_size, num_samples = len(chunk), num_samples + x_BNC.shape[1]
            yield from self.encode_chunk(x_BNC, stream)
        check_not_empty(num_samples)
        if missing := -num_samples % self.hop:
            yield from self.encode_chunk(
                x_BNC.new_zeros(len(x_BNC), missing, x_BNC.shape[2]), stream
            )

    def encode_chunk(self, x_BNC: Tensor, stream: StreamingState) -> Iterator[Tensor]:
        """Yield the codes of the frames that these samples complete, if any."""
        latent_BTD = self.encoder(x_BNC, stream)
        if latent_BTD.shape[1]:
            yield self.quantizer(latent_BTD).codes

    @torch.no_grad()
    def decode_chunks(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Decode codes that arrive in chunks (B, t_i, L); yield audio as it becomes complete.

        Together the chunks equal the audio of the whole. Each has t_i * hop samples, but the first
        has `delay` samples less, and as many follow after the last chunk of codes.
        """
        stream, batch_size, late = StreamingState(memory={}), None, self.config.delay
        for codes in chunks:
            self.check_codes(codes)
            check_same_batch(len(codes), batch_size)
            batch_size = len(codes)
            latent_BTD = self.quantizer.decode(codes)
            yield self.to_channels_first(self.decoder(latent_BTD, stream))[..., late:]
            late = 0
        if batch_size is not None and self.config.delay:
            end_BTD = latent_BTD.new_zeros(batch_size, self.frames_of_delay, latent_BTD.shape[2])
            yield self.to_channels_first(self.decoder(end_BTD, stream))[..., : self.config.delay]

    # ---- encoder and decoder

    def encode_latent(self, samples: Tensor) -> Tensor:
        """Encode (B, C, N) as latents (B, T, D) before quantization."""
        x_BNC = self.to_channels_last(samples)
        check_not_empty(x_BNC.shape[1])
        return self.encoder(F.pad(x_BNC, (0, 0, 0, -x_BNC.shape[1] % self.hop)), StreamingState())

    def decode_latent(self, latent_BTD: Tensor) -> Tensor:
        """Decode latents (B, T, D) to audio (B, C, T * hop).

        Where the decoder is late, frames of zeros follow the last one, from which the network
        predicts the end of the audio.
        """
        delay, num_samples = self.config.delay, latent_BTD.shape[1] * self.hop
        padded_BTD = F.pad(latent_BTD, (0, 0, 0, self.frames_of_delay))
        audio_BCN = self.to_channels_first(self.decoder(padded_BTD, StreamingState()))
        return audio_BCN[..., delay : delay + num_samples]

    @property
    def frames_of_delay(self) -> int:
        return self.config.num_frames(self.config.delay)

    def to_channels_last(self, samples: Tensor) -> Tensor:
        """Return (B, N, C), the layout of the layers: the samples, or mid and side of stereo."""
        check_audio_batch(samples, self.config.channels)
        return (samples if self.config.channels == 1 else to_mid_side(samples)).mT

    def to_channels_first(self, samples_BNC: Tensor) -> Tensor:
        """Return (B, C, N) in float32: the samples, or left and right of stereo."""
        samples_BCN = to_fp32(samples_BNC.mT.contiguous())
        return samples_BCN if self.config.channels == 1 else to_left_right(samples_BCN)

    def latent_mask(self, latent_BTD: Tensor, lengths_B: Tensor | None) -> Tensor | None:
        """Return (B, T), True for frames with real samples; None if all are real."""
        if lengths_B is None:
            return None
        return self.frame_mask(lengths_B.to(latent_BTD.device), latent_BTD.shape[1])


def mask_codes(codes_BTL: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Set codes of padding to -1."""
    return codes_BTL if mask_BT is None else codes_BTL.masked_fill(~mask_BT[..., None], -1)


def check_same_batch(batch_size: int, previous: int | None) -> None:
    """Raise ValueError if two chunks have different batch sizes."""
    if previous not in (None, batch_size):
        raise ValueError(
            f"A chunk with batch size {batch_size} follows one with {previous}: all chunks of a "
            "batch must have the same batch size."
        )


def to_mid_side(samples_B2N: Tensor) -> Tensor:
    """Return half of the sum and half of the difference of left and right."""
    left_BN, right_BN = samples_B2N.unbind(1)
    return torch.stack([left_BN + right_BN, left_BN - right_BN], dim=1) / 2


def to_left_right(samples_B2N: Tensor) -> Tensor:
    """Return the inverse of `to_mid_side`."""
    mid_BN, side_BN = samples_B2N.unbind(1)
    return torch.stack([mid_BN + side_BN, mid_BN - side_BN], dim=1)

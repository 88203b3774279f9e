"""Pretrained codecs: EnCodec (Defossez 2022, arXiv 2210.13438) and DAC (Kumar 2023, arXiv
2306.06546), from a folder in the Hugging Face layout.

They have the interface of `AudioCodec`: audio (B, 1, N) to codes (B, T, L) and back, with L
residual quantizers of which the first k can be decoded alone. Examples of different lengths are
processed one length at a time, because DAC is not causal, so padding would change the last frames.
For the same reason there is no streaming.

The configuration holds the complete config.json of the network. The network can thus be built from
a run folder alone: the weights are in the checkpoint, and the original folder is not needed. Until
weights are loaded from either, all weights are NaN, so that random weights cannot go unnoticed.

B batch, N samples, T frames, L codebooks, D latent dimension.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera._optional import require
from tessera.modalities.audio.features import group_by_value, num_frames
from tessera.modalities.audio.tokenizer import AudioTokenizer, check_audio_batch, check_not_empty
from tessera.nn.reconstruction import Reconstruction
from tessera.text.huggingface import (
    LOCAL_ONLY,
    check_model_folder,
    load_weights,
    silence_transformers,
    translate_errors,
)

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig


@dataclass(frozen=True, kw_only=True)
class PretrainedCodecConfig:
    """A pretrained codec. Needs the extra `text`, which installs transformers."""

    path: str = ""
    """The folder of an EnCodec or DAC model in the Hugging Face layout. It is needed only until
    there is a checkpoint."""
    num_quantizers: int | None = None
    """Number of codebooks to use; None uses all. With fewer, tokens are easier to predict and the
    quality is lower."""
    config_json: str = ""
    """The config.json of the model, read from the folder. Do not set it by hand."""

    def __post_init__(self) -> None:
        if not self.config_json:
            object.__setattr__(self, "config_json", read_model_config(self.path))
        check_supported(self)

    @cached_property
    def model_config(self) -> dict[str, Any]:
        return json.loads(self.config_json)

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return math.prod(self.model_config["upsampling_ratios"])

    @property
    def rate_hz(self) -> int:
        """Sampling rate of the codec."""
        return self.model_config["sampling_rate"]

    @property
    def max_quantizers(self) -> int:
        """Number of codebooks that the codec was trained with."""
        if self.model_config["model_type"] == "dac":
            return self.model_config["n_codebooks"]
        bits = math.ceil(self.rate_hz / self.hop) * math.ceil(
            math.log2(self.model_config["codebook_size"])
        )
        return int(1000 * self.model_config["target_bandwidths"][-1] // bits)

    def validate_data(self, data: AudioDataConfig) -> None:
        """Raise ValueError if the examples are stereo, have another rate or no samples."""
        data.check_mono("A pretrained codec")
        if data.rate_hz != self.rate_hz:
            raise ValueError(
                f"The data has a rate of {data.rate_hz} Hz, but the pretrained codec needs "
                f"{self.rate_hz} Hz: set rate_hz of the data to {self.rate_hz}."
            )
        check_not_empty(data.length)

    def grid(self, data: AudioDataConfig) -> tuple[int, ...]:
        """Return the shape of the token grid of one example: (frames,)."""
        return (num_frames(data.length, self.hop),)

    def build(self) -> PretrainedCodec:
        return (Dac if self.model_config["model_type"] == "dac" else Encodec)(self)


def import_transformers() -> ModuleType:
    return require("transformers", extra="text", purpose="A pretrained codec")


def read_model_config(path: str) -> str:
    """Return the settings in config.json as JSON, without versions and paths."""
    what = f"The codec {path!r}"
    check_model_folder(path, what)
    transformers = import_transformers()
    with translate_errors(transformers, what):
        settings = transformers.AutoConfig.from_pretrained(path, **LOCAL_ONLY).to_dict()
    ignored = {"transformers_version", "dtype", "architectures"}
    names = {
        name for name, value in settings.items() if value is not None and not name.startswith("_")
    } - ignored
    return json.dumps({name: settings[name] for name in sorted(names)})


def check_supported(config: PretrainedCodecConfig) -> None:
    """Raise ValueError unless the model is an EnCodec or DAC for one channel."""
    settings = config.model_config
    model_type = settings.get("model_type")
    if model_type not in ("encodec", "dac"):
        raise ValueError(
            f"The codec {config.path!r} is a {model_type}, but only EnCodec and DAC are supported: "
            "give one of these."
        )
    if (
        settings.get("audio_channels", 1) != 1
        or settings.get("normalize")
        or settings.get("chunk_length_s")
    ):
        raise ValueError(
            f"The codec {config.path!r} has two channels or normalizes the loudness of chunks, "
            "which its codes do not include: use one for a single channel, such as EnCodec for 24 "
            "kHz."
        )
    if config.num_quantizers is not None and not (
        1 <= config.num_quantizers <= config.max_quantizers
    ):
        raise ValueError(
            f"num_quantizers must be 1 to {config.max_quantizers} for the codec {config.path!r}, "
            f"but got {config.num_quantizers}."
        )


@dataclass(frozen=True)
class PretrainedQuantizer:
    """The properties of a quantizer that a task reads; this one is not trained."""

    num_quantizers: int
    vocab_size: int
    needs_global_stats: bool = False
    has_quantizer_dropout: bool = False

    def codebook(self) -> None:
        """Return None: codes of a residual codebook have no meaning on their own."""


class PretrainedCodec(AudioTokenizer):
    """Base class: an encoder and a decoder, with channels first, around residual quantizers."""

    config: PretrainedCodecConfig

    def __init__(self, config: PretrainedCodecConfig):
        super().__init__()
        self.config = config
        self.network = build_network(config)
        num_quantizers = config.num_quantizers or config.max_quantizers
        self.quantizer = PretrainedQuantizer(num_quantizers, config.model_config["codebook_size"])

    @property
    def rate_hz(self) -> int:
        return self.config.rate_hz

    def forward(
        self,
        samples: Tensor,
        lengths_B: Tensor | None = None,
        *,
        num_quantizers_B: Tensor | None = None,
    ) -> Reconstruction:
        """Reconstruct a batch; gradients reach only the decoder.

        Args:
            samples: (B, 1, N).
            lengths_B: Number of real samples of each example.
            num_quantizers_B: Number of quantizers used for each example.
        """
        codes_BTL = self.encode(samples, lengths_B)
        output = self.decode(codes_BTL, num_quantizers_B=num_quantizers_B)
        return Reconstruction(output[..., : samples.shape[-1]], codes_BTL, {})

    @torch.no_grad()
    def encode(self, samples: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Encode (B, 1, N) as codes (B, T, L), with -1 in frames of padding."""
        check_audio_batch(samples)
        check_not_empty(samples.shape[2])
        batch_size, _, max_len = samples.shape
        lengths = [max_len] * batch_size if lengths_B is None else lengths_B.tolist()
        codes_BTL = torch.full(
            (batch_size, num_frames(max_len, self.hop), self.num_quantizers),
            -1,
            device=samples.device,
        )
        for length, rows in group_by_value(lengths):
            if length:
                padded = F.pad(samples[rows, :, :length], (0, -length % self.hop))
                codes = self.quantize(self.network.encoder(padded))
                codes_BTL[rows, : padded.shape[-1] // self.hop] = codes
        return codes_BTL

    def decode(self, codes: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """Decode (B, T, L) to audio (B, 1, T * hop), with zeros in frames of code -1.

        L may be less than the number of quantizers; of example b, the first `num_quantizers_B[b]`
        codebooks are used.
        """
        self.check_codes(codes)
        batch_size, frames, given = codes.shape
        lengths = (codes[..., 0] >= 0).sum(1).tolist()
        if num_quantizers_B is None:
            used = [given] * batch_size
        else:
            used = num_quantizers_B.clamp(1, given).tolist()
        weight = next(self.network.decoder.parameters())
        audio_B1N = torch.zeros(
            batch_size, 1, frames * self.hop, dtype=weight.dtype, device=weight.device
        )
        for (length, num_quantizers), rows in group_by_value(zip(lengths, used, strict=True)):
            if length:
                latent_BDT = self.dequantize(codes[rows, :length, :num_quantizers])
                decoded = self.network.decoder(latent_BDT)
                audio_B1N[rows, :, : length * self.hop] = self.fit(decoded, length * self.hop)
        return audio_B1N

    def fit(self, decoded: Tensor, num_samples: int) -> Tensor:
        """Crop or pad to `num_samples`: with odd strides DAC returns a few samples less."""
        decoded = decoded.reshape(len(decoded), 1, -1)[..., :num_samples]
        return F.pad(decoded, (0, num_samples - decoded.shape[-1]))

    def check_codes(self, codes: Tensor) -> None:
        super().check_codes(codes)
        if int(codes.max()) >= self.vocab_size:
            raise ValueError(
                f"Codes must be less than the codebook size of {self.vocab_size}, but got "
                f"{int(codes.max())}: it belongs to another codec, or it is a mask or end token "
                "that must be removed."
            )

    # Implemented by the subclasses.

    def quantize(self, latent_BDT: Tensor) -> Tensor:
        """Return (B, T, L): each quantizer encodes the residual of those before it."""
        raise NotImplementedError

    def dequantize(self, codes_BTL: Tensor) -> Tensor:
        """Return latents (B, D, T)."""
        raise NotImplementedError


class Encodec(PretrainedCodec):
    def quantize(self, latent_BDT: Tensor) -> Tensor:
        codes = []
        for codebook in self.network.quantizer.layers[: self.num_quantizers]:
            codes.append(codebook.encode(latent_BDT))
            latent_BDT = latent_BDT - codebook.decode(codes[-1])
        return torch.stack(codes, dim=-1)

    def dequantize(self, codes_BTL: Tensor) -> Tensor:
        return self.network.quantizer.decode(codes_BTL.movedim(-1, 0))


class Dac(PretrainedCodec):
    def quantize(self, latent_BDT: Tensor) -> Tensor:
        codes = []
        for codebook in self.network.quantizer.quantizers[: self.num_quantizers]:
            quantized, _, _, indices, _ = codebook(latent_BDT)
            codes.append(indices)
            latent_BDT = latent_BDT - quantized
        return torch.stack(codes, dim=-1)

    def dequantize(self, codes_BTL: Tensor) -> Tensor:
        return self.network.quantizer.from_codes(codes_BTL.mT)[0]


def build_network(config: PretrainedCodecConfig) -> Any:
    """Load the network from its folder, or build it with NaN weights if the folder is gone."""
    transformers = import_transformers()
    what = f"The codec {config.path!r}"
    model_class, config_class = (
        (transformers.DacModel, transformers.DacConfig)
        if config.model_config["model_type"] == "dac"
        else (transformers.EncodecModel, transformers.EncodecConfig)
    )
    exists = Path(config.path, "config.json").is_file()
    if exists and read_model_config(config.path) == config.config_json:
        with translate_errors(transformers, what):
            weights = load_weights(model_class, config.path, **LOCAL_ONLY)
        return weights.check_complete(what)
    with silence_transformers(transformers):
        network = model_class(config_class.from_dict(config.model_config))
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    return network

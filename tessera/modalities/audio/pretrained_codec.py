"""Codecs of others in the place of ours: EnCodec (Defossez 2022, arXiv 2210.13438) and DAC (Kumar
2023, arXiv 2306.06546), from a folder in the Hugging Face layout.

What they do is what `AudioCodec` does: sounds (B, 1, N) to codes (B, T, L) and back, L residual
levels of which any first few can be decoded. Sounds of different lengths go through one length at a
time: DAC looks ahead, so what follows a sound would be heard in its last frames. There is no going
through in pieces for the same reason.

The configuration holds the whole config.json of the network. With it the network is built anew from
a run's folder alone: the weights are in the checkpoint, and the folder that they came from may be
gone. Until they have come from one or the other, every weight is not a number, so that nothing is
ever taken for sound that came from chance.

B batch, N samples, T frames, L levels, D width of the latent.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.modalities.audio.features import alike
from tessera.modalities.audio.tokenizer import AudioTokenizer, refuse_no_sounds, refuse_nothing
from tessera.modalities.image.vqgan import Reconstruction
from tessera.text.huggingface import LOCAL, library, quiet, read_weights, refuse_no_folder, told

INSTEAD = "train a codec of your own"


@dataclass(frozen=True, kw_only=True)
class PretrainedCodecConfig:
    """Somebody else's codec. Needs the extra `text`, which brings the library that knows its
    network."""

    path: str = ""
    """The folder that holds it, EnCodec or DAC in the Hugging Face layout. Needed only until there
    is a checkpoint."""
    levels: int | None = None
    """Symbols for each frame, at most as many as it has; None: all. Fewer are easier to foretell
    and sound worse."""
    facts: str = ""
    """Its config.json, read from the folder. Not to be set by hand."""

    def __post_init__(self) -> None:
        if not self.facts:
            object.__setattr__(self, "facts", facts_in(self.path))
        refuse_other_codecs(self)

    @cached_property
    def known(self) -> dict[str, Any]:
        return json.loads(self.facts)

    @property
    def hop(self) -> int:
        """Samples that one frame stands for."""
        return math.prod(self.known["upsampling_ratios"])

    @property
    def rate_hz(self) -> int:
        """Samples a second of the sounds that it knows."""
        return self.known["sampling_rate"]

    @property
    def max_levels(self) -> int:
        """As many as it was trained with."""
        if self.known["model_type"] == "dac":
            return self.known["n_codebooks"]
        bits = math.ceil(self.rate_hz / self.hop) * math.ceil(
            math.log2(self.known["codebook_size"])
        )
        return int(1000 * self.known["target_bandwidths"][-1] // bits)

    def validate_data(self, data: Any) -> None:
        """Refuses data whose sounds have another rate, or nothing to hear."""
        if data.rate_hz != self.rate_hz:
            raise ValueError(
                f"Sounds of {data.rate_hz} samples a second came to a finished codec that knows {self.rate_hz}: set "
                f"rate_hz of the data to {self.rate_hz}."
            )
        refuse_nothing(data.length)

    def grid(self, data: Any) -> tuple[int, ...]:
        """How many frames such sounds become."""
        return (-(-data.length // self.hop),)

    def build(self) -> PretrainedCodec:
        return (Dac if self.known["model_type"] == "dac" else Encodec)(self)


def facts_in(path: str) -> str:
    what = f"The codec {path!r}"
    refuse_no_folder(path, what)
    transformers = library("A codec of others", INSTEAD)
    with told(transformers, what):
        settings = transformers.AutoConfig.from_pretrained(path, **LOCAL).to_dict()
    silent = {"transformers_version", "dtype", "architectures"}
    saying = {
        name for name, value in settings.items() if value is not None and not name.startswith("_")
    } - silent
    return json.dumps({name: settings[name] for name in sorted(saying)})


def refuse_other_codecs(config: PretrainedCodecConfig) -> None:
    kind, known = config.known.get("model_type"), config.known
    if kind not in ("encodec", "dac"):
        raise ValueError(
            f"The codec {config.path!r} is a {kind}, and only EnCodec and DAC are known here: give one of these."
        )
    if known.get("audio_channels", 1) != 1 or known.get("normalize") or known.get("chunk_length_s"):
        raise ValueError(
            f"The codec {config.path!r} is for two channels, or takes sounds in pieces that are each made equally loud, and "
            "its symbols say nothing about that. Take one for a single channel, such as EnCodec's for 24 kHz."
        )
    if config.levels is not None and not 1 <= config.levels <= config.max_levels:
        raise ValueError(
            f"The codec {config.path!r} has 1 to {config.max_levels} levels, but {config.levels} are asked for."
        )


@dataclass(frozen=True)
class Cascade:
    """What a task asks a quantizer about itself; this one learns nothing."""

    levels: int
    needs_global_stats: bool = False
    has_quantizer_dropout: bool = False

    def table(self) -> None:
        """Symbols of one level say nothing by themselves."""


class PretrainedCodec(AudioTokenizer):
    """What the two have in common: an encoder and a decoder, with channels first, around a cascade
    of tables."""

    def __init__(self, config: PretrainedCodecConfig):
        super().__init__()
        self.config = config
        self.network: Any = network_of(config)
        self.quantizer = Cascade(config.levels or config.max_levels)

    @property
    def vocab_size(self) -> int:
        """Symbols of each level."""
        return self.config.known["codebook_size"]

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
        """`lengths` says how many samples of each sound are real. Only the decoder has gradients:
        symbols are what they are."""
        codes_BTL = self.encode(samples, lengths_B)
        return Reconstruction(
            self.decode(codes_BTL, num_quantizers_B=num_quantizers_B)[..., : samples.shape[-1]],
            codes_BTL,
            {},
        )

    @torch.no_grad()
    def encode(self, samples: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Sounds (B, 1, N) to symbols (B, T, L), and -1 after the end of a sound that is shorter
        than the batch."""
        refuse_no_sounds(samples)
        refuse_nothing(samples.shape[2])
        count, _, whole = samples.shape
        lengths = [whole] * count if lengths_B is None else lengths_B.tolist()
        codes_BTL = torch.full(
            (count, -(-whole // self.hop), self.levels), -1, device=samples.device
        )
        for length, here in alike(lengths):
            if length:
                padded = F.pad(samples[here, :, :length], (0, -length % self.hop))
                codes_BTL[here, : padded.shape[-1] // self.hop] = self.tokens(
                    self.network.encoder(padded)
                )
        return codes_BTL

    def decode(self, codes: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """Symbols (B, T, L), or only the first few levels of them, to sounds (B, 1, T hop); of
        sound b, `num_quantizers_B[b]` levels.

        Where symbols have ended (-1) there is nothing at all: zeros.
        """
        self.refuse_codes(codes)
        count, frames, given = codes.shape
        real = (codes[..., 0] >= 0).sum(1).tolist()
        kept = (
            [given] * count
            if num_quantizers_B is None
            else num_quantizers_B.clamp(1, given).tolist()
        )
        like = next(self.network.decoder.parameters())
        sounds = torch.zeros(count, 1, frames * self.hop, dtype=like.dtype, device=like.device)
        for (length, levels), here in alike(zip(real, kept, strict=True)):
            if length:
                played = self.network.decoder(self.latent(codes[here, :length, :levels]))
                sounds[here, :, : length * self.hop] = self.fitted(played, length * self.hop)
        return sounds

    def fitted(self, played: Tensor, samples: int) -> Tensor:
        """With odd strides DAC gives back a few samples less than it was given."""
        played = played.reshape(len(played), 1, -1)[..., :samples]
        return F.pad(played, (0, samples - played.shape[-1]))

    def refuse_codes(self, codes: Tensor) -> None:
        super().refuse_codes(codes)
        if int(codes.max()) >= self.vocab_size:
            raise ValueError(
                f"A code of {int(codes.max())} came to a codec whose levels have {self.vocab_size} symbols each: it is another "
                "codec's, or a mask or end symbol that must be left out."
            )

    # What the two do differently.

    def tables(self) -> nn.ModuleList:
        raise NotImplementedError

    def tokens(self, latent_BDT: Tensor) -> Tensor:
        """(B, T, L): level by level, each for what those above left over."""
        raise NotImplementedError

    def latent(self, codes_BTL: Tensor) -> Tensor:
        """(B, D, T)."""
        raise NotImplementedError


class Encodec(PretrainedCodec):
    def tables(self) -> nn.ModuleList:
        return self.network.quantizer.layers

    def tokens(self, latent_BDT: Tensor) -> Tensor:
        codes = []
        for table in self.tables()[: self.levels]:
            codes.append(table.encode(latent_BDT))
            latent_BDT = latent_BDT - table.decode(codes[-1])
        return torch.stack(codes, dim=-1)

    def latent(self, codes_BTL: Tensor) -> Tensor:
        return self.network.quantizer.decode(codes_BTL.movedim(-1, 0))


class Dac(PretrainedCodec):
    def tables(self) -> nn.ModuleList:
        return self.network.quantizer.quantizers

    def tokens(self, latent_BDT: Tensor) -> Tensor:
        codes = []
        for table in self.tables()[: self.levels]:
            quantized, _, _, found, _ = table(latent_BDT)
            codes.append(found)
            latent_BDT = latent_BDT - quantized
        return torch.stack(codes, dim=-1)

    def latent(self, codes_BTL: Tensor) -> Tensor:
        return self.network.quantizer.from_codes(codes_BTL.mT)[0]


def network_of(config: PretrainedCodecConfig) -> Any:
    """With the weights of its folder, while that is there."""
    transformers = library("A codec of others", INSTEAD)
    what = f"The codec {config.path!r}"
    kind, settings = (
        (transformers.DacModel, transformers.DacConfig)
        if config.known["model_type"] == "dac"
        else (transformers.EncodecModel, transformers.EncodecConfig)
    )
    if Path(config.path, "config.json").is_file() and facts_in(config.path) == config.facts:
        with told(transformers, what):
            weights = read_weights(kind, config.path, **LOCAL)
        return weights.refuse_half(what)
    with quiet(transformers):
        network = kind(settings.from_dict(config.known))
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    return network

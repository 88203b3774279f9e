"""Semantic tokens: what is said in a sound, as one symbol for each frame, by k-means over features
(HuBERT, Hsu 2021, arXiv 2106.07447, section II-A; AudioLM, Borsos 2022, arXiv 2209.03143, section
III-B).

A symbol is a centre of features. The centres are a VQ table (`nn/quantize/vq.py`), which starts by
k-means and then follows the frames that choose it, so it is k-means over all batches, and all that
the engine promises of a codebook holds for it. What moves by gradient is small: features are told
from symbols by a filter over neighbouring centres, which begins as the centre itself, because what
was said just before and after tells where in its cell a frame lies.

In k-means a feature counts by its scale, so features are first brought to a mean of 0 and a spread
of 1. Both are measured over the first few steps and then stay; only after that the table starts, so
no centre moves because the scale did.

Sounds are (B, 1, N), codes (B, T) with T = N / hop, rounded up; -1 where a sound has no sample any
more. Nothing can be played from them: `decode` gives features. A generator of sound takes them as
its condition, by their rate.

B examples, N samples, T frames, D width of the features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tessera.modalities.audio.features import (
    Features,
    MelFeatures,
    SpeechFeatures,
    VoiceFeatures,
    frames,
)
from tessera.modalities.audio.tokenizer import AudioTokenizer, refuse_no_sounds, refuse_nothing
from tessera.modalities.image.vqgan import Reconstruction
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.quantize import VQ, ProcessGroup, VQConfig


@dataclass(frozen=True, kw_only=True)
class SemanticConfig:
    features: MelFeatures | SpeechFeatures | VoiceFeatures = field(default_factory=MelFeatures)
    """What is heard in a sound."""
    vocab_size: int = 256
    """Symbols: the k of k-means."""
    measured: int = 20
    """Steps over which the scale of the features is measured, before the first symbol is found."""
    context: int = 5
    """Frames whose symbols together tell the features of the middle one; an odd number, and 1 is
    the centre alone."""
    decay: float = 0.99
    """How much of its average a centre keeps at each step."""
    expire_below: float = 0.1
    """A symbol used less than this fraction of an even share is put elsewhere; 0: never."""

    def __post_init__(self) -> None:
        if self.measured < 1:
            raise ValueError(
                f"The scale of features is measured over 1 step or more, but `measured` is {self.measured}."
            )
        if self.context < 1 or self.context % 2 == 0:
            raise ValueError(
                f"A frame has as many neighbours before it as after, so `context` is odd, not {self.context}."
            )
        self.table(1)

    @property
    def hop(self) -> int:
        """Samples that one symbol stands for."""
        return self.features.hop

    @property
    def rate_hz(self) -> int:
        """Samples a second of the sounds."""
        return self.features.rate_hz

    def table(self, dim: int) -> VQConfig:
        return VQConfig(
            codebook_size=self.vocab_size, code_dim=dim, normalised=False, decay=self.decay, commitment_weight=0.0,
            expire_below=self.expire_below,
        )  # fmt: skip

    def validate_data(self, data: Any) -> None:
        """Refuses data whose sounds have another rate, or nothing to hear."""
        if data.rate_hz != self.rate_hz:
            raise ValueError(
                f"Sounds of {data.rate_hz} samples a second came to features for {self.rate_hz}: set rate_hz of the data or of "
                "the features (those of a finished network have the rate that it learnt from)."
            )
        if data.length < self.hop:
            raise ValueError(
                f"Sounds of {data.length} samples do not fill one frame of {self.hop}: use longer ones."
            )

    def grid(self, data: Any) -> tuple[int, ...]:
        """How many symbols such sounds become."""
        return (frames(data.length, self.hop),)

    def build(self) -> SemanticTokenizer:
        return SemanticTokenizer(self)


@dataclass
class Told(Reconstruction):
    """`output` are features in their own units, (B, T, 2, D): as the symbols tell them, and as they
    were heard. Where a sound has ended nothing was heard, which is not a number."""

    distance_B: Tensor
    """How far the two are apart over a sound's own frames: the mean square, where all features have
    a spread of 1. With a single symbol it would be about 1."""


class SemanticTokenizer(AudioTokenizer):
    def __init__(self, config: SemanticConfig):
        super().__init__()
        self.config = config
        self.features: Features = config.features.build()
        dim = self.features.dim
        self.scale = Scale(dim, config.measured)
        self.quantizer: VQ = config.table(dim).build(dim)
        self.neighbours = nn.Conv1d(dim, dim, config.context, padding=config.context // 2)
        nn.init.dirac_(self.neighbours.weight)
        nn.init.zeros_(self.neighbours.bias)

    @property
    def rate_hz(self) -> int:
        return self.config.rate_hz

    def forward(self, samples: Tensor, lengths_B: Tensor | None = None) -> Told:
        """`lengths` says how many samples of each sound are real. All there is to lose is the mean
        of `distance_B`."""
        features_BTD, real_BT = self.heard(samples, lengths_B)
        with full_precision(samples.device.type):
            self.scale.accumulate_stats(features_BTD[real_BT])
            rows_BTD = self.scale(features_BTD)
            quantized = self.quantizer(rows_BTD, real_BT)
            if not self.scale.known:
                self.quantizer.rollback()  # what is noted in another scale would start the table wrong
            told_BTD = self.told(quantized.latent)
            distance_B = mean_over_frames_B((told_BTD - rows_BTD).square().mean(-1), real_BT)
        codes_BT = quantized.codes.masked_fill(~real_BT, -1)
        heard_BTD = features_BTD.masked_fill(~real_BT[..., None], torch.nan)
        output_BT2D = torch.stack([self.scale.undo(told_BTD), heard_BTD], dim=2)
        return Told(output_BT2D, codes_BT, {"distance": distance_B.mean()}, distance_B.detach())

    @torch.no_grad()
    def encode(self, samples: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Sounds (B, 1, N) to symbols (B, T)."""
        features_BTD, real_BT = self.heard(samples, lengths_B)
        with full_precision(samples.device.type):
            rows_PD = self.scale(features_BTD[real_BT])
            codes_BT = torch.full(real_BT.shape, -1, device=samples.device)
            codes_BT[real_BT] = self.quantizer.nearest(rows_PD)
        return codes_BT

    def decode(self, codes: Tensor) -> Tensor:
        """Symbols (B, T) to the features (B, T, D) that they stand for; -1 is no frame."""
        if codes.ndim != 2:
            raise ValueError(
                f"Codes of shape {tuple(codes.shape)} came to a semantic tokenizer: give (batch, frames)."
            )
        with full_precision(codes.device.type):
            latent_BTD = self.quantizer.decode(codes.clamp_min(0)) * (codes >= 0).unsqueeze(-1)
            return self.scale.undo(self.told(latent_BTD))

    def heard(self, samples: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Features (B, T, D), and which frames hold a real sample."""
        refuse_no_sounds(samples)
        refuse_nothing(samples.shape[2])
        features_BTD = self.features(samples, lengths_B)
        lengths_B = (
            torch.full(samples.shape[:1], samples.shape[2]) if lengths_B is None else lengths_B
        )
        return features_BTD, self.real(lengths_B.to(samples.device), features_BTD.shape[1])

    def told(self, latent_BTD: Tensor) -> Tensor:
        """What symbols and their neighbours say together, in the scale of the table."""
        return self.neighbours(to_fp32(latent_BTD).mT).mT


def mean_over_frames_B(numbers_BT: Tensor, real_BT: Tensor) -> Tensor:
    """Every sound counts the same, however long it is."""
    return (numbers_BT * real_BT).sum(1) / real_BT.sum(1).clamp_min(1)


class Scale(nn.Module):
    """Mean and spread of each feature over the first steps of a run; then they stay.

    Forward only takes notes, as a codebook does: the notes of all processes meet in `commit`.
    """

    def __init__(self, dim: int, steps: int):
        super().__init__()
        self.steps = steps
        self.notes: Tensor | None = None
        self.register_buffer("done", torch.zeros((), dtype=torch.long))
        self.register_buffer("totals", torch.zeros(3, dim))
        self.done: Tensor
        self.totals: Tensor
        """How many frames, their sum, and the sum of their squares."""

    @property
    def known(self) -> bool:
        return int(self.done) >= self.steps

    def forward(self, features: Tensor) -> Tensor:
        mean_D, spread_D = self.mean_and_spread()
        return (features - mean_D) / spread_D

    def undo(self, rows: Tensor) -> Tensor:
        mean_D, spread_D = self.mean_and_spread()
        return rows * spread_D + mean_D

    def mean_and_spread(self) -> tuple[Tensor, Tensor]:
        """0 and 1 as long as nothing is known. A feature that never changes keeps to a spread that
        can be divided by."""
        count_D, sum_D, square_D = to_fp32(self.totals)
        mean_D = sum_D / count_D.clamp_min(1)
        variance_D = square_D / count_D.clamp_min(1) - mean_D.square()
        return mean_D, torch.where(count_D > 0, variance_D.clamp_min(1e-6).sqrt(), 1.0)

    def accumulate_stats(self, features_PD: Tensor) -> None:
        if not self.training or self.known:
            return
        noted = torch.stack(
            [torch.ones_like(features_PD).sum(0), features_PD.sum(0), features_PD.square().sum(0)]
        )
        self.notes = noted if self.notes is None else self.notes + noted

    def rollback(self) -> None:
        self.notes = None

    @torch.no_grad()
    def commit(self, dist: ProcessGroup, step: int) -> None:
        if self.notes is None:
            return
        self.totals += dist.all_reduce_sum(self.notes).to(self.totals)
        self.done += 1
        self.rollback()

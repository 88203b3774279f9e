"""MuLan (Huang 2022, arXiv 2208.12415): music and texts as points of one space, near each other
where they belong together.

Two towers, one that hears and one that reads, each followed by a head that leads into the common
space, on its unit sphere. Beside the points at the end there may be some of layers before it, for a
loss that asks the question at several depths; point 0 to L - 2 are those, and the last, L - 1, is
what is published.

B clips or texts, N samples, L points of each, D numbers of a point, W width of a tower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig, mean_of
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.transformer import FeedForward, Norm, linear
from tessera.text.encoder import LearnedTextConfig, PretrainedTextConfig
from tessera.text.token_ids import TokenIdTextConfig

FIRST_SCALE, LARGEST_SCALE = 10.0, 100.0
"""What cosines are multiplied by, in the beginning and at most (CLIP's largest: Radford 2021, arXiv
2103.00020, section 2.5)."""
FIRST_BIAS = -10.0
"""Of the sigmoid loss: nearly all pairs of a batch do not belong together (Zhai 2023, arXiv
2303.15343, section 3.2)."""


@dataclass(frozen=True, kw_only=True)
class MuLaNConfig:
    audio: SpectrogramTransformerConfig = field(default_factory=SpectrogramTransformerConfig)
    text: LearnedTextConfig | PretrainedTextConfig | TokenIdTextConfig = field(
        default_factory=LearnedTextConfig
    )
    """What reads captions: learnt with the rest, one of Hugging Face's, or one for texts that come
    as numbers."""
    latent: int = 128
    """Numbers of a point in the common space."""

    def __post_init__(self) -> None:
        if self.latent < 2:
            raise ValueError(
                f"A point on a sphere has at least 2 numbers, but latent is {self.latent}."
            )

    def validate_data(self, data: Any) -> None:
        self.audio.validate_data(data)

    def build(self, *, biased: bool = False, layers: int = 0) -> MuLaN:
        """`biased` for the sigmoid loss; `layers`: points of so many layers before the last."""
        return MuLaN(self, biased=biased, layers=layers)


class MuLaN(nn.Module):
    def __init__(self, config: MuLaNConfig, *, biased: bool = False, layers: int = 0):
        super().__init__()
        self.config = config
        self.audio, self.text = config.audio.build(), config.text.build()
        self.audio_layers = spread(layers, config.audio.depth, "audio")
        self.text_layers = spread(layers, self.text.depth, "text")
        self.audio_heads = nn.ModuleList(
            [Head(self.audio.dim, config.latent) for _ in range(layers + 1)]
        )
        self.text_heads = nn.ModuleList(
            [Head(self.text.dim, config.latent) for _ in range(layers + 1)]
        )
        self.log_scale = nn.Parameter(torch.full((layers + 1,), math.log(FIRST_SCALE)))
        self.bias = nn.Parameter(torch.full((layers + 1,), FIRST_BIAS)) if biased else None

    # ---- as a task asks

    def first(self, examples: Any, chances: Sequence[Generator] | None = None) -> Tensor:
        """(B, L, D): the points of some clips. In training, each is heard as its generator says."""
        samples_BN = examples.samples.squeeze(1)
        states = self.audio(samples_BN, examples.lengths, chances, self.audio_layers)
        return self.points(states, self.audio_heads)

    def second(self, captions: Sequence[str]) -> Tensor:
        """(B, L, D): the points of some texts."""
        layers = self.text.layers(captions, at=self.text_layers)
        return self.points(
            [mean_of(states.values, states.mask) for states in layers], self.text_heads
        )

    @staticmethod
    def points(states: Sequence[Tensor], heads: nn.ModuleList) -> Tensor:
        return torch.stack([head(one) for head, one in zip(heads, states, strict=True)], dim=1)

    def scale(self) -> Tensor:
        """(L,): what cosines are multiplied by."""
        return self.log_scale.clamp_max(math.log(LARGEST_SCALE)).exp()

    @torch.no_grad()
    def hold_scale(self) -> None:
        """Beyond its bound the scale would feel no gradient, and never come back."""
        self.log_scale.clamp_(max=math.log(LARGEST_SCALE))

    # ---- as a person asks

    def get_audio_latents(self, samples: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(B, D) of clips (B, N) or (B, 1, N) in [-1, 1]; of each, the first `lengths` samples are
        real: all, if it is not said.

        In training nothing is left out of these clips either.
        """
        if samples.ndim not in (2, 3) or (samples.ndim == 3 and samples.shape[1] != 1):
            raise ValueError(
                f"Clips are (clips, samples) or (clips, 1, samples), one channel, but these are {tuple(samples.shape)}."
            )
        samples_BN = samples.reshape(len(samples), -1)
        if lengths is None:
            lengths = torch.full((len(samples),), samples_BN.shape[1], device=samples.device)
        return self.audio_heads[-1](self.audio(samples_BN, lengths)[-1])

    def get_text_latents(self, texts: Sequence[str]) -> Tensor:
        """(B, D)"""
        return self.second(texts)[:, -1]

    def similarity(
        self, samples: Tensor, texts: Sequence[str], lengths: Tensor | None = None
    ) -> Tensor:
        """(clips, texts): the cosine of each clip and each text, -1 to 1."""
        return self.get_audio_latents(samples, lengths) @ self.get_text_latents(texts).T


class Head(nn.Module):
    """From a tower's states to the common space."""

    def __init__(self, dim: int, latent: int):
        super().__init__()
        self.feed, self.norm, self.out = FeedForward(dim), Norm(dim), linear(dim, latent)

    def forward(self, state_BW: Tensor) -> Tensor:
        latent_BD = self.out(self.norm(state_BW + self.feed(state_BW)))
        with full_precision(latent_BD.device.type):
            return F.normalize(to_fp32(latent_BD), dim=-1)


def spread(layers: int, depth: int, tower: str) -> tuple[int, ...]:
    """After how many blocks the points of the layers before the last are taken, evenly spread."""
    if layers < 0 or layers >= depth:
        raise ValueError(
            f"The {tower} tower has {depth} block(s), so there are {max(0, depth - 1)} layers before the last, and not "
            f"{layers}: ask for fewer layers, or make the tower deeper."
        )
    return tuple(round(depth * (number + 1) / (layers + 1)) for number in range(layers))

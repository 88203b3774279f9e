"""MuLan (Huang 2022, arXiv 2208.12415): a joint embedding of music and text.

An audio tower and a text tower, each followed by a head that projects to the unit sphere of a
common space. Besides the final embeddings there may be embeddings of intermediate layers, for a
loss at several depths: 0 to L - 2 are those, and the last, L - 1, is the one that is used.

B segments or texts, N samples, L embeddings of each, D `latent`, W `dim` of a tower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tessera.modalities.music.spectrogram_transformer import (
    AugmentationDraws,
    SpectrogramTransformerConfig,
    masked_mean,
)
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.transformer import FeedForward, Norm, linear
from tessera.text.encoder import Texts
from tessera.text.learned import LearnedTextConfig
from tessera.text.pretrained import PretrainedTextConfig
from tessera.text.token_ids import TokenIdTextConfig

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig
    from tessera.modalities.audio.media import AudioBatch

INITIAL_SCALE, MAX_SCALE = 10.0, 100.0
"""The factor of the cosine similarities: initial value and upper bound (the bound is CLIP's:
Radford 2021, arXiv 2103.00020, section 2.5)."""
INITIAL_BIAS = -10.0
"""For the sigmoid loss: nearly all pairs of a batch are negatives (Zhai 2023, arXiv 2303.15343,
section 3.2)."""


@dataclass(frozen=True, kw_only=True)
class MuLaNConfig:
    audio: SpectrogramTransformerConfig = field(default_factory=SpectrogramTransformerConfig)
    """The audio tower."""
    text: LearnedTextConfig | PretrainedTextConfig | TokenIdTextConfig = field(
        default_factory=LearnedTextConfig
    )
    """The text tower: trained from scratch, pretrained from Hugging Face, or for texts that are
    token ids."""
    latent: int = 128
    """The dimension of the embeddings."""

    def __post_init__(self) -> None:
        if self.latent < 2:
            raise ValueError(f"latent must be at least 2, got {self.latent}.")

    def validate_data(self, data: AudioDataConfig) -> None:
        """Raise ValueError if the audio tower cannot read the data."""
        self.audio.validate_data(data)

    def build(self, *, biased: bool = False, layers: int = 0) -> MuLaN:
        """Build the model.

        Args:
            biased: Whether similarities have a bias, for the sigmoid loss.
            layers: The number of intermediate layers that have embeddings too.
        """
        return MuLaN(self, biased=biased, layers=layers)


class MuLaN(nn.Module):
    def __init__(self, config: MuLaNConfig, *, biased: bool = False, layers: int = 0):
        super().__init__()
        self.config = config
        self.audio, self.text = config.audio.build(), config.text.build()
        self.audio_layers = select_layers(layers, config.audio.depth, "audio")
        self.text_layers = select_layers(layers, self.text.depth, "text")
        self.audio_heads = nn.ModuleList(
            [Head(self.audio.dim, config.latent) for _ in range(layers + 1)]
        )
        self.text_heads = nn.ModuleList(
            [Head(self.text.dim, config.latent) for _ in range(layers + 1)]
        )
        self.log_scale = nn.Parameter(torch.full((layers + 1,), math.log(INITIAL_SCALE)))
        self.bias = nn.Parameter(torch.full((layers + 1,), INITIAL_BIAS)) if biased else None

    # ---- for the contrastive objective

    def draw(self, examples: AudioBatch, generators: Sequence[Generator]) -> AugmentationDraws:
        """Draw the augmentation and the dropped patches of each example from its generator."""
        lengths_B = examples.lengths.cpu()
        return self.audio.draw(lengths_B, examples.samples.shape[-1], generators)

    def embed_media(self, examples: AudioBatch, draws: AugmentationDraws | None = None) -> Tensor:
        """Return the embeddings (B, L, D) of audio segments, augmented as `draws` say."""
        samples_BN = examples.samples.squeeze(1)
        states = self.audio(samples_BN, examples.lengths, draws, self.audio_layers)
        return apply_heads(states, self.audio_heads)

    def embed_text(self, captions: Texts) -> Tensor:
        """Return the embeddings (B, L, D) of texts."""
        layers = self.text.hidden_states(captions, at=self.text_layers)
        means = [masked_mean(states.values, states.mask) for states in layers]
        return apply_heads(means, self.text_heads)

    def scale(self) -> Tensor:
        """Return (L,): the factor of the cosine similarities."""
        return self.log_scale.clamp_max(math.log(MAX_SCALE)).exp()

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """Clamp the scale parameter to its bound, beyond which it would have no gradient."""
        self.log_scale.clamp_(max=math.log(MAX_SCALE))

    # ---- for inference

    def get_audio_latents(self, samples: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the embeddings (B, D) of audio (B, N) or (B, 1, N) in [-1, 1], never augmented.

        `lengths` is the number of real samples of each segment; by default all are real.
        """
        if samples.ndim not in (2, 3) or (samples.ndim == 3 and samples.shape[1] != 1):
            raise ValueError(
                "samples must have one channel and the shape (segments, samples) or (segments, 1, "
                f"samples), got {tuple(samples.shape)}: average the channels first."
            )
        samples_BN = samples.reshape(len(samples), -1)
        if lengths is None:
            lengths = torch.full((len(samples),), samples_BN.shape[1], device=samples.device)
        return self.audio_heads[-1](self.audio(samples_BN, lengths)[-1])

    def get_text_latents(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings (B, D) of texts."""
        return self.embed_text(texts)[:, -1]

    def similarity(
        self, samples: Tensor, texts: Sequence[str], lengths: Tensor | None = None
    ) -> Tensor:
        """Return the cosine similarity of each segment and each text, (segments, texts)."""
        return self.get_audio_latents(samples, lengths) @ self.get_text_latents(texts).T


class Head(nn.Module):
    """Projects the mean state of a tower to the unit sphere of the common space."""

    def __init__(self, dim: int, latent: int):
        super().__init__()
        self.feed, self.norm, self.out = FeedForward(dim), Norm(dim), linear(dim, latent)

    def forward(self, state_BW: Tensor) -> Tensor:
        latent_BD = self.out(self.norm(state_BW + self.feed(state_BW)))
        with full_precision(latent_BD.device.type):
            return F.normalize(to_fp32(latent_BD), dim=-1)


def apply_heads(states: Sequence[Tensor], heads: nn.ModuleList) -> Tensor:
    """Apply one head to the state (B, W) of each layer and return the embeddings (B, L, D)."""
    return torch.stack([head(state) for head, state in zip(heads, states, strict=True)], dim=1)


def select_layers(layers: int, depth: int, tower: str) -> tuple[int, ...]:
    """Return after how many blocks the intermediate embeddings are taken, evenly spaced."""
    if layers < 0 or layers >= depth:
        raise ValueError(
            f"The {tower} tower has {depth} block(s), so layers must be 0 to {max(0, depth - 1)}, "
            f"got {layers}: use fewer layers, or a deeper tower."
        )
    return tuple(round(depth * (number + 1) / (layers + 1)) for number in range(layers))

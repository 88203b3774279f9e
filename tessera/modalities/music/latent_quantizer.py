"""Quantize MuLan's embeddings to tokens, and embed the tokens as a condition for generators
(MusicLM: Agostinelli 2023, arXiv 2301.11325, section 3.3).

A generator that is trained on audio alone is conditioned on the tokens of that audio's own
embedding. Texts have embeddings in the same space, so at inference it can be conditioned on the
tokens of a text. MuLan is frozen and the codebooks are fitted to its embeddings once; each
generator learns its own embedding table for the tokens (a *namespace*).

B segments or texts, D dimension of an embedding, L quantizers, V tokens of each, W dimension of a
namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn

from tessera.modalities.music.mulan import MuLaN
from tessera.nn.quantize import ResidualConfig, ResidualQuantizer, VQConfig
from tessera.nn.quantize.vq import SAMPLES_PER_EXAMPLE, VQ


@dataclass(frozen=True, kw_only=True)
class LatentQuantizerConfig:
    num_quantizers: int = 8
    """The number of residual quantizers, and so of tokens per embedding."""
    codebook_size: int = 1024
    """The number of tokens of each quantizer."""
    decay: float = 0.9
    """The decay of the codebooks' moving averages in each iteration of the fit."""

    def build(self, mulan: MuLaN, namespaces: Mapping[str, int]) -> MuLaNEmbedQuantizer:
        """Build the quantizer.

        `namespaces` maps the name of each generator to the dimension of its states, such as
        {"coarse": 512, "fine": 512}.
        """
        return MuLaNEmbedQuantizer(self, mulan, namespaces)


class SingleProcess:
    """The process group of a fit in one process."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        return tensor


class MuLaNEmbedQuantizer(nn.Module):
    """Residual codebooks, which only `fit` changes, and trainable token embeddings.

    MuLan itself is frozen and not part of the state dict.
    """

    def __init__(self, config: LatentQuantizerConfig, mulan: MuLaN, namespaces: Mapping[str, int]):
        super().__init__()
        if not namespaces:
            raise ValueError(
                "namespaces is empty, but at least one generator is needed: pass its name and "
                'dimension, such as {"semantic": 512}.'
            )
        self.config = config
        # In a tuple, so that nn.Module does not register it.
        self._mulan = (mulan.eval().requires_grad_(False),)
        latent = mulan.config.latent
        vq = VQConfig(
            codebook_size=config.codebook_size,
            code_dim=latent,
            decay=config.decay,
            commitment_weight=0.0,
        )
        residual = ResidualConfig(quantizer=vq, num_quantizers=config.num_quantizers)
        self.quantizer: ResidualQuantizer = residual.build(latent).eval()
        shape = (config.num_quantizers, config.codebook_size)
        self.embeddings = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(*shape, dim) * 0.02)
                for name, dim in namespaces.items()
            }
        )

    @property
    def mulan(self) -> MuLaN:
        return self._mulan[0]

    def train(self, mode: bool = True) -> Self:
        """Set the mode, but keep the quantizer in evaluation mode: only `fit` may update it."""
        super().train(mode)
        self.quantizer.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.mulan._apply(fn, recurse)
        return super()._apply(fn, recurse)

    # ---- codebooks

    @property
    def levels(self) -> list[VQ]:
        """The residual quantizers in order."""
        return [cast(VQ, level) for level in self.quantizer.quantizers]

    @torch.no_grad()
    def fit(self, latents_BD: Tensor, iterations: int = 50) -> float:
        """Fit the codebooks to embeddings and return the fraction of their variance that the tokens
        explain."""
        if len(latents_BD) < 2:
            raise ValueError(
                f"Codebooks are fitted to at least 2 embeddings, got {len(latents_BD)}: pass the "
                "embeddings of many segments."
            )
        self.quantizer.train()
        # A quantizer is initialized only after the one before it.
        for step in range(self.config.num_quantizers + iterations):
            # Groups of this size are used completely, and in the given order.
            for group_RD in latents_BD.split(SAMPLES_PER_EXAMPLE):
                self.quantizer(group_RD.unsqueeze(0))
            for level in self.levels:
                level.commit(SingleProcess(), step)
        self.quantizer.eval()
        residual = (self.latents(self.codes(latents_BD)) - latents_BD).square().sum()
        return float(1 - residual / (latents_BD - latents_BD.mean(0)).square().sum())

    @property
    def fitted(self) -> bool:
        """Whether all codebooks are initialized."""
        return all(level.is_initialized for level in self.levels)

    def codes(self, latents_BD: Tensor) -> Tensor:
        """Return the tokens (B, L) of embeddings."""
        if not self.fitted:
            raise ValueError(
                "The codebooks are not fitted: call fit(latents) with the embeddings of music "
                "first."
            )
        with torch.no_grad():
            return self.quantizer(latents_BD).codes

    def latents(self, codes_BL: Tensor) -> Tensor:
        """Return the embeddings (B, D) that tokens represent."""
        return self.quantizer.decode(codes_BL)

    # ---- condition

    def condition(self, codes_BL: Tensor, namespace: str) -> Tensor:
        """Return the embeddings (B, L, W) of tokens for one generator."""
        if namespace not in self.embeddings:
            raise ValueError(
                f"There is no namespace {namespace!r}: use one of {', '.join(self.embeddings)}."
            )
        level_L = torch.arange(codes_BL.shape[1], device=codes_BL.device)
        return self.embeddings[namespace][level_L, codes_BL]

    def condition_on_audio(
        self, samples: Tensor, namespace: str, lengths: Tensor | None = None
    ) -> Tensor:
        """Return the condition (B, L, W) for audio (B, N) in [-1, 1]."""
        with torch.no_grad():
            latents = self.mulan.get_audio_latents(samples, lengths)
        return self.condition(self.codes(latents), namespace)

    def condition_on_text(self, texts: Sequence[str], namespace: str) -> Tensor:
        """Return the condition (B, L, W) for texts."""
        with torch.no_grad():
            latents = self.mulan.get_text_latents(texts)
        return self.condition(self.codes(latents), namespace)

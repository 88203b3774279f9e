"""Points of MuLan's space as symbols, and the symbols as a condition for generators (MusicLM:
Agostinelli 2023, arXiv 2301.11325, section 3.3).

A generator that learns from music alone is conditioned on the symbols of that music's own point.
Since texts lie in the same space, it can then be asked in words: a text's point is written in the
same symbols. The space is frozen and the table is fitted to it once; what each symbol of each level
means to a generator is learnt by that generator, in a table of its own (a *namespace*).

B clips or texts, D numbers of a point, L levels, V symbols of each, W width of a namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from tessera.modalities.music.mulan import MuLaN
from tessera.nn.quantize import ResidualConfig, ResidualQuantizer, VQConfig
from tessera.nn.quantize.vq import SAMPLE_PER_EXAMPLE


@dataclass(frozen=True, kw_only=True)
class LatentQuantizerConfig:
    levels: int = 8
    """Symbols of a point, each writing what those before left over."""
    codebook_size: int = 1024
    """Symbols of each level."""
    decay: float = 0.9
    """How much of its averages a symbol keeps in each round of the fit."""

    def build(self, mulan: MuLaN, namespaces: Mapping[str, int]) -> MuLaNEmbedQuantizer:
        """`namespaces`: for each generator its name and the width of its states, such as {"coarse":
        512, "fine": 512}."""
        return MuLaNEmbedQuantizer(self, mulan, namespaces)


class Alone:
    """The fit is done by one process."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor


class MuLaNEmbedQuantizer(nn.Module):
    """The table is moved by `fit` alone, and the embeddings by whoever trains with them; MuLan
    itself is held, and never moves."""

    def __init__(self, config: LatentQuantizerConfig, mulan: MuLaN, namespaces: Mapping[str, int]):
        super().__init__()
        if not namespaces:
            raise ValueError(
                'A condition is for somebody: name at least one namespace and its width, such as {"semantic": 512}.'
            )
        self.config = config
        self._held = (
            mulan.eval().requires_grad_(False),
        )  # a tuple, so that nn.Module does not register it
        latent = mulan.config.latent
        table = VQConfig(
            codebook_size=config.codebook_size,
            code_dim=latent,
            decay=config.decay,
            commitment_weight=0.0,
        )
        self.quantizer: ResidualQuantizer = (
            ResidualConfig(quantizer=table, levels=config.levels).build(latent).eval()
        )
        self.embeddings = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(config.levels, config.codebook_size, dim) * 0.02)
                for name, dim in namespaces.items()
            }
        )

    @property
    def mulan(self) -> MuLaN:
        return self._held[0]

    def train(self, mode: bool = True) -> Self:
        """The table takes notes in train mode, and only the fit may move it."""
        super().train(mode)
        self.quantizer.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.mulan._apply(fn, recurse)
        return super()._apply(fn, recurse)

    # ---- the table

    @torch.no_grad()
    def fit(self, latents_BD: Tensor, decoding_steps: int = 50) -> float:
        """Moves the table to these points, round by round; gives back the share of their variance
        that the symbols tell."""
        if len(latents_BD) < 2:
            raise ValueError(
                f"A table of symbols is fitted to many points, but there are {len(latents_BD)}."
            )
        self.quantizer.train()
        for step in range(
            self.config.levels + decoding_steps
        ):  # a level begins when the one above it has
            for group_RD in latents_BD.split(
                SAMPLE_PER_EXAMPLE
            ):  # of each group all rows are looked at, and in the order given
                self.quantizer(group_RD.unsqueeze(0))
            for level in self.quantizer.cascade:
                level.commit(Alone(), step)
        self.quantizer.eval()
        missed = (self.latents(self.codes(latents_BD)) - latents_BD).square().sum()
        return float(1 - missed / (latents_BD - latents_BD.mean(0)).square().sum())

    @property
    def fitted(self) -> bool:
        return all(level.ready for level in self.quantizer.cascade)  # type: ignore[union-attr]

    def codes(self, latents_BD: Tensor) -> Tensor:
        """(B, L): the symbols of some points."""
        if not self.fitted:
            raise ValueError(
                "The table of symbols has not been fitted: call fit(latents) with the points of some music first."
            )
        with torch.no_grad():
            return self.quantizer(latents_BD).codes

    def latents(self, codes_BL: Tensor) -> Tensor:
        """(B, D): the points that symbols stand for."""
        return self.quantizer.decode(codes_BL)

    # ---- the condition

    def condition(self, codes_BL: Tensor, namespace: str) -> Tensor:
        """(B, L, W): what the symbols mean to one generator."""
        if namespace not in self.embeddings:
            raise ValueError(
                f"There is no namespace {namespace!r}: there are {', '.join(self.embeddings)}."
            )
        levels_L = torch.arange(codes_BL.shape[1], device=codes_BL.device)
        return self.embeddings[namespace][levels_L, codes_BL]

    def of_audio(self, samples: Tensor, namespace: str, lengths: Tensor | None = None) -> Tensor:
        """(B, L, W) of clips (B, N) in [-1, 1]."""
        with torch.no_grad():
            latents = self.mulan.get_audio_latents(samples, lengths)
        return self.condition(self.codes(latents), namespace)

    def of_texts(self, texts: Sequence[str], namespace: str) -> Tensor:
        """(B, L, W)"""
        with torch.no_grad():
            latents = self.mulan.get_text_latents(texts)
        return self.condition(self.codes(latents), namespace)

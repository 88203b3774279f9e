"""Residual quantization: each level writes, in symbols of its own, what the levels above left over.

The cascade refines one space, that of the first level's symbols: a latent is projected there and
brought into range once, and each level then picks its symbol for the remainder (Zeghidour et al.
2021, SoundStream, arXiv 2107.03312, algorithm 1). FSQ and LFQ levels are ever finer copies of one
grid; VQ levels learn theirs. Any first k levels decode by themselves, the better the more there
are.

Quantizer dropout (section III-C there) teaches that: in training some examples keep only their
first few levels. The draw belongs to the example, so the caller makes it, from the example's own
generator, and passes `num_quantizers_B`. Levels that an example does not keep do not see it:
nothing is noted or penalised there, and its codes there are 0, a valid symbol that decode() must be
told to leave out (the same `num_quantizers_B`), since 0 would otherwise speak.

The cascade itself has no `commit`: the engine finds those of its levels.

Letters: B examples, P real places, W width of the cascade, L levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.quantize.base import (
    PositionMask,
    Quantized,
    Quantizer,
    among_zeros,
    straight_through,
)
from tessera.nn.quantize.fsq import FSQConfig
from tessera.nn.quantize.lfq import LFQConfig
from tessera.nn.quantize.vq import VQConfig


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """Several quantizers of one kind, each writing what those above left over."""

    quantizer: FSQConfig | LFQConfig | VQConfig = field(default_factory=VQConfig)
    """The kind of every level."""
    levels: int = 8
    """Symbols per place."""
    dropout: float = 0.0
    """How often a training example keeps only some first levels, their number drawn evenly."""

    def __post_init__(self) -> None:
        if type(self.levels) is not int or self.levels < 1:
            raise ValueError(
                f"a residual cascade of {self.levels!r} levels writes nothing: use 1 or more, such as 8"
            )
        if not 0 <= self.dropout <= 1:
            raise ValueError(
                f"residual dropout is {self.dropout}, but it is a probability: use 0 to 1, such as 0.5"
            )

    def build(self, dim: int) -> ResidualQuantizer:
        return ResidualQuantizer(self, dim=dim)


class ResidualQuantizer(Quantizer):
    def __init__(self, config: ResidualConfig, *, dim: int) -> None:
        cascade = [config.quantizer.build_level(number) for number in range(config.levels)]
        super().__init__(dim=dim, code_dim=cascade[0].code_dim, vocab_size=cascade[0].vocab_size)
        self.config = config
        self.levels = config.levels
        self.cascade = nn.ModuleList(cascade)
        self.needs_global_stats = any(level.needs_global_stats for level in cascade)
        self.has_quantizer_dropout = config.dropout > 0

    def forward(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Quantized:
        """As Quantizer.forward, with codes (B, ..., L); example b is written in its first
        `num_quantizers_B[b]` levels only."""
        places = self.places(latent, mask)
        num_quantizers_B = self.kept(num_quantizers_B, latent)
        with full_precision(latent.device.type):
            rows_PW = self.native(latent, places)
            visits = list(self.descend(rows_PW, places, num_quantizers_B))
            total_PW = torch.stack([visit.spread(visit.values) for visit in visits]).sum(0)
            codes_PL = torch.stack([visit.spread(visit.codes) for visit in visits], dim=-1)
            penalties = self.mean_penalties(visits, places)
            self.accumulate_stats(visits)
            rows_PD = self.project_out(straight_through(rows_PW, total_PW))
        return Quantized(places.put(rows_PD.to(latent.dtype)), places.put(codes_PL), penalties)

    def decode(self, codes: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """The latents of codes (B, ..., k), of all L levels or the first k; of example b only its
        first `num_quantizers_B[b]`."""
        if not 1 <= codes.shape[-1] <= self.levels:
            raise ValueError(
                f"codes of shape {tuple(codes.shape)} have {codes.shape[-1]} symbols per place, but this cascade has"
                f" {self.levels} levels: give (batch, ..., k) with k from 1 to {self.levels}"
            )
        self.check_codes(codes)
        num_quantizers_B = self.kept(num_quantizers_B, codes).reshape(-1, *[1] * (codes.ndim - 1))
        with full_precision(codes.device.type):
            dtype = to_fp32(self.like).dtype
            parts = [
                self.level(number).values(level_codes, dtype) * (num_quantizers_B > number)
                for number, level_codes in enumerate(codes.unbind(-1))
            ]
            return self.project_out(torch.stack(parts).sum(0)).to(self.like.dtype)

    @torch.no_grad()
    def batch_stats(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Tensor:
        places = self.places(latent, mask)
        with full_precision(latent.device.type):
            visits = self.descend(
                self.native(latent, places), places, self.kept(num_quantizers_B, latent)
            )
            return torch.cat([visit.level.statistic(visit.rows, places.count) for visit in visits])

    def set_global_stats(self, total_S: Tensor | None) -> None:
        parts = [None] * self.levels if total_S is None else total_S.chunk(self.levels)
        for number, part in enumerate(parts):
            self.level(number).set_global_stats(part)

    def num_quantizers_to_keep(self, chance_B: Tensor) -> Tensor:
        """How many levels examples keep, by one number in [0, 1) each, drawn from the example's own
        generator."""
        if self.config.dropout == 0:
            return torch.full_like(chance_B, self.levels, dtype=torch.long)
        some_B = 1 + (chance_B / self.config.dropout * self.levels).long()
        return some_B.clamp_max(self.levels)

    def table(self) -> Tensor | None:
        return self.level(0).table() if self.levels == 1 else None

    def bound(self, rows_PW: Tensor) -> Tensor:
        return self.level(0).bound(rows_PW)

    def descend(
        self, rows_PW: Tensor, places: PositionMask, num_quantizers_B: Tensor
    ) -> Iterator[Visit]:
        """Level by level, the rows that come so deep and the symbols they get. Gradients reach
        every remainder."""
        keep_P = num_quantizers_B.repeat_interleave(places.per_example_B)
        for number in range(self.levels):
            level, here_P = self.level(number), keep_P > number
            rows = rows_PW[here_P]
            codes = level.nearest(rows)
            values = level.values(codes, rows.dtype)
            visit = Visit(
                level,
                here_P,
                places.per_example_B * (num_quantizers_B > number),
                rows,
                codes,
                values,
            )
            yield visit
            rows_PW = rows_PW - visit.spread(visit.values)

    def mean_penalties(self, visits: list[Visit], places: PositionMask) -> dict[str, Tensor]:
        """The mean over levels, so that a weight means the same for any number of them."""
        each = [visit.level.penalties(visit.rows, visit.values, places.count) for visit in visits]
        return {
            name: torch.stack([penalties[name] for penalties in each]).mean() for name in each[0]
        }

    def accumulate_stats(self, visits: list[Visit]) -> None:
        """Of every level down to the first that has not started: below it, remainders mean nothing
        yet."""
        for visit in visits:
            visit.level.accumulate_stats(visit.rows, visit.codes, visit.per_example_B)
            if not visit.level.ready:
                break

    def level(self, number: int) -> Quantizer:
        return cast(Quantizer, self.cascade[number])

    def kept(self, num_quantizers_B: Tensor | None, batch: Tensor) -> Tensor:
        if num_quantizers_B is None:
            return torch.full(batch.shape[:1], self.levels, device=batch.device)
        if (
            num_quantizers_B.shape != batch.shape[:1]
            or not 1 <= int(num_quantizers_B.min()) <= int(num_quantizers_B.max()) <= self.levels
        ):
            raise ValueError(
                f"keep_B is {num_quantizers_B.tolist()} for a batch of {len(batch)}: give one number of levels per example,"
                f" from 1 to {self.levels}"
            )
        return num_quantizers_B


@dataclass
class Visit:
    """What happened at one level of the cascade to the rows that came so deep."""

    level: Quantizer
    here_P: Tensor
    per_example_B: Tensor
    rows: Tensor
    codes: Tensor
    values: Tensor

    def spread(self, rows: Tensor) -> Tensor:
        return among_zeros(rows, self.here_P)

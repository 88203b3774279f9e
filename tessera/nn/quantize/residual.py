"""Residual quantization: each level writes, in symbols of its own, what the levels above left over.

The cascade refines one space, that of the first level's symbols: a latent is projected there and brought into range
once, and each level then picks its symbol for the remainder (Zeghidour et al. 2021, SoundStream, arXiv 2107.03312,
algorithm 1). FSQ and LFQ levels are ever finer copies of one grid; VQ levels learn theirs. Any first k levels decode
by themselves, the better the more there are.

Quantizer dropout (section III-C there) teaches that: in training some examples keep only their first few levels. The
draw belongs to the example, so the caller makes it, from the example's own generator, and passes `keep_B`. Levels
that an example does not keep do not see it: nothing is noted or penalised there, and its codes there are 0, a valid
symbol that decode() must be told to leave out (the same `keep_B`), since 0 would otherwise speak.

The cascade itself has no `settle`: the engine finds those of its levels.

Letters: B examples, P real places, W width of the cascade, L levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from tessera.nn.precision import full_precision, wide
from tessera.nn.quantize.base import Places, Quantized, Quantizer, among_zeros, straight_through
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
            raise ValueError(f"a residual cascade of {self.levels!r} levels writes nothing: use 1 or more, such as 8")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"residual dropout is {self.dropout}, but it is a probability: use 0 to 1, such as 0.5")

    def build(self, dim: int) -> ResidualQuantizer:
        return ResidualQuantizer(self, dim=dim)


class ResidualQuantizer(Quantizer):
    def __init__(self, config: ResidualConfig, *, dim: int) -> None:
        cascade = [config.quantizer.build_level(number) for number in range(config.levels)]
        super().__init__(dim=dim, width=cascade[0].width, vocabulary=cascade[0].vocabulary)
        self.config = config
        self.levels = config.levels
        self.cascade = nn.ModuleList(cascade)
        self.whole_batch = any(level.whole_batch for level in cascade)
        self.drops_levels = config.dropout > 0

    def forward(self, latent: Tensor, mask: Tensor | None = None, *, keep_B: Tensor | None = None) -> Quantized:
        """As Quantizer.forward, with codes (B, ..., L); example b is written in its first `keep_B[b]` levels only."""
        places = self.places(latent, mask)
        keep_B = self.kept(keep_B, latent)
        with full_precision(latent.device.type):
            rows_PW = self.native(latent, places)
            visits = list(self.descend(rows_PW, places, keep_B))
            total_PW = torch.stack([visit.spread(visit.values) for visit in visits]).sum(0)
            codes_PL = torch.stack([visit.spread(visit.codes) for visit in visits], dim=-1)
            penalties = self.mean_penalties(visits, places)
            self.take_notes(visits)
            rows_PD = self.project_out(straight_through(rows_PW, total_PW))
        return Quantized(places.put(rows_PD.to(latent.dtype)), places.put(codes_PL), penalties)

    def decode(self, codes: Tensor, *, keep_B: Tensor | None = None) -> Tensor:
        """The latents of codes (B, ..., k), of all L levels or the first k; of example b only its first `keep_B[b]`."""
        if not 1 <= codes.shape[-1] <= self.levels:
            raise ValueError(
                f"codes of shape {tuple(codes.shape)} have {codes.shape[-1]} symbols per place, but this cascade has"
                f" {self.levels} levels: give (batch, ..., k) with k from 1 to {self.levels}"
            )
        self.check_codes(codes)
        keep_B = self.kept(keep_B, codes).reshape(-1, *[1] * (codes.ndim - 1))
        with full_precision(codes.device.type):
            dtype = wide(self.like).dtype
            parts = [
                self.level(number).values(level_codes, dtype) * (keep_B > number)
                for number, level_codes in enumerate(codes.unbind(-1))
            ]
            return self.project_out(torch.stack(parts).sum(0)).to(self.like.dtype)

    @torch.no_grad()
    def observe(self, latent: Tensor, mask: Tensor | None = None, *, keep_B: Tensor | None = None) -> Tensor:
        places = self.places(latent, mask)
        with full_precision(latent.device.type):
            visits = self.descend(self.native(latent, places), places, self.kept(keep_B, latent))
            return torch.cat([visit.level.statistic(visit.rows, places.count) for visit in visits])

    def expect(self, total_S: Tensor | None) -> None:
        parts = [None] * self.levels if total_S is None else total_S.chunk(self.levels)
        for number, part in enumerate(parts):
            self.level(number).expect(part)

    def levels_to_keep(self, chance_B: Tensor) -> Tensor:
        """How many levels examples keep, by one number in [0, 1) each, drawn from the example's own generator."""
        if self.config.dropout == 0:
            return torch.full_like(chance_B, self.levels, dtype=torch.long)
        some_B = 1 + (chance_B / self.config.dropout * self.levels).long()
        return some_B.clamp_max(self.levels)

    def table(self) -> Tensor | None:
        return self.level(0).table() if self.levels == 1 else None

    def enter(self, rows_PW: Tensor) -> Tensor:
        return self.level(0).enter(rows_PW)

    def descend(self, rows_PW: Tensor, places: Places, keep_B: Tensor) -> Iterator[Visit]:
        """Level by level, the rows that come so deep and the symbols they get. Gradients reach every remainder."""
        keep_P = keep_B.repeat_interleave(places.per_example_B)
        for number in range(self.levels):
            level, here_P = self.level(number), keep_P > number
            rows = rows_PW[here_P]
            codes = level.nearest(rows)
            values = level.values(codes, rows.dtype)
            visit = Visit(level, here_P, places.per_example_B * (keep_B > number), rows, codes, values)
            yield visit
            rows_PW = rows_PW - visit.spread(visit.values)

    def mean_penalties(self, visits: list[Visit], places: Places) -> dict[str, Tensor]:
        """The mean over levels, so that a weight means the same for any number of them."""
        each = [visit.level.penalties(visit.rows, visit.values, places.count) for visit in visits]
        return {name: torch.stack([penalties[name] for penalties in each]).mean() for name in each[0]}

    def take_notes(self, visits: list[Visit]) -> None:
        """Of every level down to the first that has not started: below it, remainders mean nothing yet."""
        for visit in visits:
            visit.level.remember(visit.rows, visit.codes, visit.per_example_B)
            if not visit.level.ready:
                break

    def level(self, number: int) -> Quantizer:
        return cast(Quantizer, self.cascade[number])

    def kept(self, keep_B: Tensor | None, batch: Tensor) -> Tensor:
        if keep_B is None:
            return torch.full(batch.shape[:1], self.levels, device=batch.device)
        if keep_B.shape != batch.shape[:1] or not 1 <= int(keep_B.min()) <= int(keep_B.max()) <= self.levels:
            raise ValueError(
                f"keep_B is {keep_B.tolist()} for a batch of {len(batch)}: give one number of levels per example,"
                f" from 1 to {self.levels}"
            )
        return keep_B


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

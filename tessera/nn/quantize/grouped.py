"""Grouped residual quantization: the latent in several parts, each written by a residual cascade of its own.

Several small tables say as much as one vast table: two groups of 1,024 symbols tell a million things apart at every level, and
each table is filled by every place of the batch (Yang et al. 2023, HiFi-Codec, arXiv 2305.02765). The latent is
projected once, to the width of all groups together, so any width can be parted, and what goes into which group is learnt.

**The order of symbols is coarse to fine**: first the symbols that all groups have for level 0, then those for level 1, and so
on. So whatever speaks of "the first k levels" (codes cut short, `keep_B`, a generator that works level by level) means what it
means for one cascade, and `levels` is their whole number, groups times the levels of each. It need not be a multiple of the
groups: those symbols that are left out add nothing to the part they speak of.

Like a cascade, this has no `settle`: the engine finds those of the levels.

Letters: B examples, P real places, W width of all groups together, G groups, L levels of all groups together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.precision import full_precision, wide
from tessera.nn.quantize.base import Places, Quantized, Quantizer
from tessera.nn.quantize.residual import ResidualConfig, ResidualQuantizer


@dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """Several residual cascades side by side, each for a part of the latent."""

    residual: ResidualConfig = field(default_factory=ResidualConfig)
    """The cascade of every group. Its dropout drops a level of all groups at once."""
    groups: int = 2
    """Parts of the latent; a place has so many symbols at each level."""

    def __post_init__(self) -> None:
        if type(self.groups) is not int or self.groups < 1:
            raise ValueError(f"a latent cannot be parted into {self.groups!r} groups: use 1 or more, such as 2")

    def build(self, dim: int) -> GroupedQuantizer:
        return GroupedQuantizer(self, dim=dim)


class GroupedQuantizer(Quantizer):
    def __init__(self, config: GroupedConfig, *, dim: int) -> None:
        width = config.residual.quantizer.build_level(0).width
        parts = [Part(config.residual, dim=width) for _ in range(config.groups)]
        super().__init__(dim=dim, width=width * config.groups, vocabulary=parts[0].vocabulary)
        self.config = config
        self.groups = config.groups
        self.levels = config.residual.levels * config.groups
        self.parts = nn.ModuleList(parts)
        self.whole_batch = parts[0].whole_batch
        self.drops_levels = parts[0].drops_levels

    def table(self) -> None:
        """Symbols of several groups say nothing by themselves."""

    def forward(self, latent: Tensor, mask: Tensor | None = None, *, keep_B: Tensor | None = None) -> Quantized:
        """As Quantizer.forward, with codes (B, ..., L); example b is written in its first `keep_B[b]` symbols only."""
        places = self.places(latent, mask)
        keep_B = self.kept(keep_B, latent)
        with full_precision(latent.device.type):
            written = [part(share, mask, keep_B=keep) for part, share, keep in self.shares(latent, places, keep_B)]
            rows_PD = self.project_out(places.pick(torch.cat([one.latent for one in written], dim=-1)))
        return Quantized(
            places.put(rows_PD.to(latent.dtype)),
            torch.stack([one.codes for one in written], dim=-1).flatten(-2),
            mean_over_groups([one.penalties for one in written]),
        )

    def decode(self, codes: Tensor, *, keep_B: Tensor | None = None) -> Tensor:
        """The latents of codes (B, ..., k), of all L symbols or the first k; of example b only its first `keep_B[b]`."""
        given = codes.shape[-1]
        if not 1 <= given <= self.levels:
            raise ValueError(
                f"codes of shape {tuple(codes.shape)} have {given} symbols per place, but {self.groups} groups of"
                f" {self.levels // self.groups} levels have {self.levels}: give (batch, ..., k) with k from 1 to {self.levels}"
            )
        self.check_codes(codes)
        keep_B = self.kept(keep_B, codes).clamp_max(given)
        codes_by_group = F.pad(codes, (0, self.levels - given)).unflatten(-1, (-1, self.groups)).unbind(-1)
        with full_precision(codes.device.type):
            decoded = [
                part.decode(part_codes, keep_B=self.of_group(number, keep_B))
                for number, (part, part_codes) in enumerate(zip(self.each(), codes_by_group, strict=True))
            ]
            return self.project_out(wide(torch.cat(decoded, dim=-1))).to(self.like.dtype)

    @torch.no_grad()
    def observe(self, latent: Tensor, mask: Tensor | None = None, *, keep_B: Tensor | None = None) -> Tensor:
        places = self.places(latent, mask)
        with full_precision(latent.device.type):
            shares = self.shares(latent, places, self.kept(keep_B, latent))
            return torch.cat([part.observe(share, mask, keep_B=keep) for part, share, keep in shares])

    def expect(self, total_S: Tensor | None) -> None:
        totals = [None] * self.groups if total_S is None else total_S.chunk(self.groups)
        for part, total in zip(self.each(), totals, strict=True):
            part.expect(total)

    def levels_to_keep(self, chance_B: Tensor) -> Tensor:
        """How many symbols examples keep, by one number in [0, 1) each: those of whole levels, alike in all groups."""
        return self.groups * self.each()[0].levels_to_keep(chance_B)

    def shares(self, latent: Tensor, places: Places, keep_B: Tensor) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Each group's cascade, its part (B, ..., W / G) of the latent, and how many levels its examples keep."""
        projected = places.put(self.project_in(wide(places.pick(latent))))
        for number, (part, share) in enumerate(zip(self.each(), projected.chunk(self.groups, dim=-1), strict=True)):
            yield part, share, self.of_group(number, keep_B)

    def of_group(self, number: int, keep_B: Tensor) -> Tensor:
        """How many of an example's first `keep_B` symbols are this group's: they are dealt to the groups in turn."""
        return torch.div(keep_B - number + self.groups - 1, self.groups, rounding_mode="floor")

    def each(self) -> list[Part]:
        return cast("list[Part]", list(self.parts))

    def kept(self, keep_B: Tensor | None, batch: Tensor) -> Tensor:
        if keep_B is None:
            return torch.full(batch.shape[:1], self.levels, device=batch.device)
        if keep_B.shape != batch.shape[:1] or not 1 <= int(keep_B.min()) <= int(keep_B.max()) <= self.levels:
            raise ValueError(
                f"keep_B is {keep_B.tolist()} for a batch of {len(batch)}: give one number of symbols per example,"
                f" from 1 to {self.levels}, all groups counted together"
            )
        return keep_B


class Part(ResidualQuantizer):
    """The cascade of one group. An example that keeps few symbols may have none here, and then this part of it is nothing."""

    def kept(self, keep_B: Tensor | None, batch: Tensor) -> Tensor:
        """The whole has looked at it."""
        assert keep_B is not None
        return keep_B


def mean_over_groups(each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """So that a weight means the same for any number of them."""
    return {name: torch.stack([penalties[name] for penalties in each]).mean() for name in each[0]}

"""Grouped residual quantization: the latent in several parts, each written by a residual cascade of
its own.

Several small tables say as much as one vast table: two groups of 1,024 symbols tell a million
things apart at every level, and each table is filled by every place of the batch (Yang et al. 2023,
HiFi-Codec, arXiv 2305.02765). The latent is projected once, to the width of all groups together, so
any width can be parted, and what goes into which group is learnt.

**The order of symbols is coarse to fine**: first the symbols that all groups have for level 0, then
those for level 1, and so on. So whatever speaks of "the first k levels" (codes cut short,
`num_quantizers_B`, a generator that works level by level) means what it means for one cascade, and
`levels` is their whole number, groups times the levels of each. It need not be a multiple of the
groups: those symbols that are left out add nothing to the part they speak of.

Like a cascade, this has no `commit`: the engine finds those of the levels.

Letters: B examples, P real places, W width of all groups together, G groups, L levels of all groups
together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.quantize.base import PositionMask, Quantized, Quantizer
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
            raise ValueError(
                f"a latent cannot be parted into {self.groups!r} groups: use 1 or more, such as 2"
            )

    def build(self, dim: int) -> GroupedQuantizer:
        return GroupedQuantizer(self, dim=dim)


class GroupedQuantizer(Quantizer):
    def __init__(self, config: GroupedConfig, *, dim: int) -> None:
        code_dim = config.residual.quantizer.build_level(0).code_dim
        parts = [Part(config.residual, dim=code_dim) for _ in range(config.groups)]
        super().__init__(dim=dim, code_dim=code_dim * config.groups, vocab_size=parts[0].vocab_size)
        self.config = config
        self.groups = config.groups
        self.levels = config.residual.levels * config.groups
        self.parts = nn.ModuleList(parts)
        self.needs_global_stats = parts[0].needs_global_stats
        self.has_quantizer_dropout = parts[0].has_quantizer_dropout

    def table(self) -> None:
        """Symbols of several groups say nothing by themselves."""

    def forward(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Quantized:
        """As Quantizer.forward, with codes (B, ..., L); example b is written in its first
        `num_quantizers_B[b]` symbols only."""
        places = self.places(latent, mask)
        num_quantizers_B = self.kept(num_quantizers_B, latent)
        with full_precision(latent.device.type):
            written = [
                part(share, mask, num_quantizers_B=keep)
                for part, share, keep in self.shares(latent, places, num_quantizers_B)
            ]
            rows_PD = self.project_out(
                places.pick(torch.cat([one.latent for one in written], dim=-1))
            )
        return Quantized(
            places.put(rows_PD.to(latent.dtype)),
            torch.stack([one.codes for one in written], dim=-1).flatten(-2),
            mean_over_groups([one.penalties for one in written]),
        )

    def decode(self, codes: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """The latents of codes (B, ..., k), of all L symbols or the first k; of example b only its
        first `num_quantizers_B[b]`."""
        given = codes.shape[-1]
        if not 1 <= given <= self.levels:
            raise ValueError(
                f"codes of shape {tuple(codes.shape)} have {given} symbols per place, but {self.groups} groups of"
                f" {self.levels // self.groups} levels have {self.levels}: give (batch, ..., k) with k from 1 to {self.levels}"
            )
        self.check_codes(codes)
        num_quantizers_B = self.kept(num_quantizers_B, codes).clamp_max(given)
        codes_by_group = (
            F.pad(codes, (0, self.levels - given)).unflatten(-1, (-1, self.groups)).unbind(-1)
        )
        with full_precision(codes.device.type):
            decoded = [
                part.decode(part_codes, num_quantizers_B=self.of_group(number, num_quantizers_B))
                for number, (part, part_codes) in enumerate(
                    zip(self.each(), codes_by_group, strict=True)
                )
            ]
            return self.project_out(to_fp32(torch.cat(decoded, dim=-1))).to(self.like.dtype)

    @torch.no_grad()
    def batch_stats(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Tensor:
        places = self.places(latent, mask)
        with full_precision(latent.device.type):
            shares = self.shares(latent, places, self.kept(num_quantizers_B, latent))
            return torch.cat(
                [
                    part.batch_stats(share, mask, num_quantizers_B=keep)
                    for part, share, keep in shares
                ]
            )

    def set_global_stats(self, total_S: Tensor | None) -> None:
        totals = [None] * self.groups if total_S is None else total_S.chunk(self.groups)
        for part, total in zip(self.each(), totals, strict=True):
            part.set_global_stats(total)

    def num_quantizers_to_keep(self, chance_B: Tensor) -> Tensor:
        """How many symbols examples keep, by one number in [0, 1) each: those of whole levels,
        alike in all groups."""
        return self.groups * self.each()[0].num_quantizers_to_keep(chance_B)

    def shares(
        self, latent: Tensor, places: PositionMask, num_quantizers_B: Tensor
    ) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Each group's cascade, its part (B, ..., W / G) of the latent, and how many levels its
        examples keep."""
        projected = places.put(self.project_in(to_fp32(places.pick(latent))))
        for number, (part, share) in enumerate(
            zip(self.each(), projected.chunk(self.groups, dim=-1), strict=True)
        ):
            yield part, share, self.of_group(number, num_quantizers_B)

    def of_group(self, number: int, num_quantizers_B: Tensor) -> Tensor:
        """How many of an example's first `num_quantizers_B` symbols are this group's: they are
        dealt to the groups in turn."""
        return torch.div(
            num_quantizers_B - number + self.groups - 1, self.groups, rounding_mode="floor"
        )

    def each(self) -> list[Part]:
        return cast("list[Part]", list(self.parts))

    def kept(self, num_quantizers_B: Tensor | None, batch: Tensor) -> Tensor:
        if num_quantizers_B is None:
            return torch.full(batch.shape[:1], self.levels, device=batch.device)
        if (
            num_quantizers_B.shape != batch.shape[:1]
            or not 1 <= int(num_quantizers_B.min()) <= int(num_quantizers_B.max()) <= self.levels
        ):
            raise ValueError(
                f"keep_B is {num_quantizers_B.tolist()} for a batch of {len(batch)}: give one number of symbols per example,"
                f" from 1 to {self.levels}, all groups counted together"
            )
        return num_quantizers_B


class Part(ResidualQuantizer):
    """The cascade of one group. An example that keeps few symbols may have none here, and then this
    part of it is nothing."""

    def kept(self, num_quantizers_B: Tensor | None, batch: Tensor) -> Tensor:
        """The whole has looked at it."""
        assert num_quantizers_B is not None
        return num_quantizers_B


def mean_over_groups(each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """So that a weight means the same for any number of them."""
    return {name: torch.stack([penalties[name] for penalties in each]).mean() for name in each[0]}

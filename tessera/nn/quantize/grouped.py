"""Grouped residual quantization: the latent is split into groups, each with its own residual
quantizer.

Several small codebooks are as expressive as one very large codebook: two groups of 1,024 codes
distinguish a million combinations at each level, and each codebook is trained by every position of
the batch (Yang et al. 2023, HiFi-Codec, arXiv 2305.02765). The latent is projected once, to the
code dimension of all groups together, so any dimension can be split and the assignment of content
to groups is learned.

**Codes are ordered from coarse to fine**: first the codes of all groups for level 0, then those for
level 1, and so on. "The first k quantizers" (codes of the first levels, `num_quantizers_B`, a
generator that works level by level) therefore has the meaning that it has for one residual
quantizer, and `num_quantizers` is the total number: groups times the levels of each. k need not be
a multiple of the groups: codes that are left out add nothing to their part of the latent.

As for a residual quantizer, there is no `commit` here: the engine finds the `commit` of each level.

Shape suffixes: B examples, P valid positions, W code dimension of all groups together, G groups, L
quantizers of all groups together.
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
from tessera.nn.quantize.residual import (
    ResidualConfig,
    ResidualQuantizer,
    average_penalties,
    check_num_quantizers,
)


@dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """Grouped residual quantization: one residual quantizer for each part of the latent."""

    residual: ResidualConfig = field(default_factory=ResidualConfig)
    """The residual quantizer of every group. Its dropout drops a level of all groups at once."""
    groups: int = 2
    """Number of parts of the latent, which is the number of codes per position at each level."""

    def __post_init__(self) -> None:
        if type(self.groups) is not int or self.groups < 1:
            raise ValueError(
                f"groups of a grouped quantizer is {self.groups!r}, but it must be a whole number"
                " of 1 or more: use 2, for example."
            )

    def build(self, dim: int) -> GroupedQuantizer:
        return GroupedQuantizer(self, dim=dim)


class GroupedQuantizer(Quantizer):
    """Several residual quantizers, each for its part of the latent."""

    def __init__(self, config: GroupedConfig, *, dim: int) -> None:
        code_dim = config.residual.quantizer.build_level(0).code_dim
        groups = [GroupQuantizer(config.residual, dim=code_dim) for _ in range(config.groups)]
        super().__init__(
            dim=dim, code_dim=code_dim * config.groups, vocab_size=groups[0].vocab_size
        )
        self.config = config
        self.groups = config.groups
        self.num_quantizers = config.residual.num_quantizers * config.groups
        self.group_quantizers = nn.ModuleList(groups)
        self.needs_global_stats = groups[0].needs_global_stats
        self.has_quantizer_dropout = groups[0].has_quantizer_dropout

    def codebooks(self) -> None:
        """Return None: a code has no vector of its own."""

    def forward(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Quantized:
        """Quantize latents as `Quantizer.forward` does, with codes (B, ..., L).

        Example b uses only its first `num_quantizers_B[b]` quantizers.
        """
        positions = self.position_mask(latent, mask)
        num_quantizers_B = self.resolve_num_quantizers(num_quantizers_B, latent)
        with full_precision(latent.device.type):
            outputs = [
                quantizer(part, mask, num_quantizers_B=group_num_B)
                for quantizer, part, group_num_B in self.split_groups(
                    latent, positions, num_quantizers_B
                )
            ]
            quantized = torch.cat([output.latent for output in outputs], dim=-1)
            rows_PD = self.out_proj(positions.select(quantized))
        return Quantized(
            positions.scatter(rows_PD.to(latent.dtype)),
            torch.stack([output.codes for output in outputs], dim=-1).flatten(-2),
            average_penalties([output.penalties for output in outputs]),
        )

    def decode(self, codes: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """Return the latents of codes (B, ..., k) of all L quantizers or of the first k.

        For example b only the first `num_quantizers_B[b]` codes are used.
        """
        given = codes.shape[-1]
        if not 1 <= given <= self.num_quantizers:
            raise ValueError(
                f"Codes of shape {tuple(codes.shape)} have {given} codes per position, but"
                f" {self.groups} groups of {self.num_quantizers // self.groups} quantizers have"
                f" {self.num_quantizers}: give (batch, ..., k) with k from 1 to"
                f" {self.num_quantizers}."
            )
        self.check_codes(codes)
        num_quantizers_B = self.resolve_num_quantizers(num_quantizers_B, codes)
        if num_quantizers_B is None:
            num_quantizers_B = torch.full(codes.shape[:1], given, device=codes.device)
        num_quantizers_B = num_quantizers_B.clamp_max(given)
        padded = F.pad(codes, (0, self.num_quantizers - given))
        codes_by_group = padded.unflatten(-1, (-1, self.groups)).unbind(-1)
        with full_precision(codes.device.type):
            decoded = [
                quantizer.decode(
                    group_codes, num_quantizers_B=self.group_num_quantizers(group, num_quantizers_B)
                )
                for group, (quantizer, group_codes) in enumerate(
                    zip(self.quantizer_list(), codes_by_group, strict=True)
                )
            ]
            return self.out_proj(to_fp32(torch.cat(decoded, dim=-1))).to(self.dummy.dtype)

    @torch.no_grad()
    def batch_stats(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Tensor:
        positions = self.position_mask(latent, mask)
        num_quantizers_B = self.resolve_num_quantizers(num_quantizers_B, latent)
        with full_precision(latent.device.type):
            return torch.cat(
                [
                    quantizer.batch_stats(part, mask, num_quantizers_B=group_num_B)
                    for quantizer, part, group_num_B in self.split_groups(
                        latent, positions, num_quantizers_B
                    )
                ]
            )

    def set_global_stats(self, total_S: Tensor | None) -> None:
        totals = [None] * self.groups if total_S is None else total_S.chunk(self.groups)
        for quantizer, total in zip(self.quantizer_list(), totals, strict=True):
            quantizer.set_global_stats(total)

    def sample_num_quantizers(self, u_B: Tensor) -> Tensor:
        """Return how many quantizers each example uses, given a uniform number in [0, 1) for each.

        The result counts whole levels, the same in all groups.
        """
        return self.groups * self.quantizer_list()[0].sample_num_quantizers(u_B)

    def split_groups(
        self, latent: Tensor, positions: PositionMask, num_quantizers_B: Tensor | None
    ) -> Iterator[tuple[GroupQuantizer, Tensor, Tensor | None]]:
        """Yield each group's quantizer, its part (B, ..., W / G) of the projected latent, and how
        many of its quantizers each example uses."""
        projected = positions.scatter(self.in_proj(to_fp32(positions.select(latent))))
        for group, (quantizer, part) in enumerate(
            zip(self.quantizer_list(), projected.chunk(self.groups, dim=-1), strict=True)
        ):
            yield quantizer, part, self.group_num_quantizers(group, num_quantizers_B)

    def group_num_quantizers(self, group: int, num_quantizers_B: Tensor | None) -> Tensor | None:
        """Return how many of an example's first `num_quantizers_B` codes belong to a group.

        Codes alternate between the groups. None are all codes.
        """
        if num_quantizers_B is None:
            return None
        return torch.div(
            num_quantizers_B - group + self.groups - 1, self.groups, rounding_mode="floor"
        )

    def quantizer_list(self) -> list[GroupQuantizer]:
        return cast("list[GroupQuantizer]", list(self.group_quantizers))

    def resolve_num_quantizers(
        self, num_quantizers_B: Tensor | None, batch: Tensor
    ) -> Tensor | None:
        """Check the number of quantizers of each example, over all groups; None uses all."""
        if num_quantizers_B is not None:
            check_num_quantizers(
                num_quantizers_B, len(batch), self.num_quantizers, noun="quantizers of all groups"
            )
        return num_quantizers_B


class GroupQuantizer(ResidualQuantizer):
    """The residual quantizer of one group.

    An example with few codes may have none in this group; this part of its latent is then zero.
    """

    def resolve_num_quantizers(
        self, num_quantizers_B: Tensor | None, batch: Tensor
    ) -> Tensor | None:
        """Return the given numbers, which `GroupedQuantizer` has checked and which may be zero."""
        return num_quantizers_B

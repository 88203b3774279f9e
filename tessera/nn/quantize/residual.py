"""Residual quantization: each quantizer encodes the remainder that the quantizers above it leave.

All levels refine one space, that of the first quantizer's codes: a latent is projected and bounded
once, and each level then quantizes the remainder (Zeghidour et al. 2021, SoundStream, arXiv
2107.03312, algorithm 1). FSQ and LFQ levels are finer and finer copies of one grid; VQ and SimVQ
levels learn their codebooks. The codes of the first k levels can be decoded alone, and quality
grows with k.

Quantizer dropout (section III-C there) trains for this: some training examples use only their first
few quantizers. The number is drawn per example, so the caller draws it from the example's own
generator and passes `num_quantizers_B`. The quantizers that an example does not use do not receive
it: it adds nothing to their statistics and penalties, and its codes there are 0. Since 0 is a valid
code, decode() needs the same `num_quantizers_B` to leave these levels out.

The residual quantizer itself has no `commit`: the engine finds the `commit` of each level.

Shape suffixes: B examples, P valid positions, W code dimension, L residual quantizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from tessera.engine.device import can_read
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.quantize.base import (
    PositionMask,
    Quantized,
    Quantizer,
    attach_gradients,
)
from tessera.nn.quantize.fsq import FSQConfig
from tessera.nn.quantize.lfq import LFQConfig
from tessera.nn.quantize.simvq import SimVQConfig
from tessera.nn.quantize.vq import VQConfig

LevelQuantizerConfig = FSQConfig | LFQConfig | VQConfig | SimVQConfig
"""Quantizers with one code per position, which can be the levels of a residual quantizer."""


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """Residual quantization: each quantizer encodes the remainder of those above it."""

    quantizer: LevelQuantizerConfig = field(default_factory=VQConfig)
    """The quantizer of every level."""
    num_quantizers: int = 8
    """Number of residual quantizers, which is the number of codes per position."""
    dropout: float = 0.0
    """Probability that a training example uses only its first few quantizers, whose number is drawn
    uniformly."""

    def __post_init__(self) -> None:
        if type(self.num_quantizers) is not int or self.num_quantizers < 1:
            raise ValueError(
                f"num_quantizers of a residual quantizer is {self.num_quantizers!r}, but it must be"
                " a whole number of 1 or more: use 8, for example."
            )
        if not 0 <= self.dropout <= 1:
            raise ValueError(
                f"dropout of a residual quantizer is {self.dropout}, but it is a probability: use 0"
                " to 1, such as 0.5."
            )

    def build(self, dim: int) -> ResidualQuantizer:
        return ResidualQuantizer(self, dim=dim)


class ResidualQuantizer(Quantizer):
    """A stack of quantizers of one kind, each of which encodes the remainder of those above it."""

    def __init__(self, config: ResidualConfig, *, dim: int) -> None:
        levels = [config.quantizer.build_level(level) for level in range(config.num_quantizers)]
        super().__init__(dim=dim, code_dim=levels[0].code_dim, vocab_size=levels[0].vocab_size)
        self.config = config
        self.num_quantizers = config.num_quantizers
        self.gradient = levels[0].gradient
        self.quantizers = nn.ModuleList(levels)
        self.needs_global_stats = any(quantizer.needs_global_stats for quantizer in levels)
        self.has_quantizer_dropout = config.dropout > 0

    def forward(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Quantized:
        """Quantize latents as `Quantizer.forward` does, with codes (B, ..., L).

        Example b uses only its first `num_quantizers_B[b]` quantizers.
        """
        positions = self.position_mask(latent, mask)
        num_quantizers_B = self.resolve_num_quantizers(num_quantizers_B, latent)
        with full_precision(latent.device.type):
            rows_PW = self.project_in(latent, positions)
            outputs = list(self.quantize_levels(rows_PW, positions, num_quantizers_B))
            total_PW = torch.stack([output.quantized for output in outputs]).sum(0)
            codes_PL = torch.stack([output.codes for output in outputs], dim=-1)
            penalties = self.mean_penalties(outputs, positions)
            self.accumulate_level_stats(outputs)
            rows_PD = self.out_proj(attach_gradients(rows_PW, total_PW, self.gradient))
        return Quantized(
            positions.scatter(rows_PD.to(latent.dtype)), positions.scatter(codes_PL), penalties
        )

    def decode(self, codes: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """Return the latents of codes (B, ..., k) of all L quantizers or of the first k.

        For example b only the first `num_quantizers_B[b]` codes are used.
        """
        if not 1 <= codes.shape[-1] <= self.num_quantizers:
            raise ValueError(
                f"Codes of shape {tuple(codes.shape)} have {codes.shape[-1]} codes per position,"
                f" but this residual quantizer has {self.num_quantizers} quantizers: give"
                f" (batch, ..., k) with k from 1 to {self.num_quantizers}."
            )
        self.check_codes(codes)
        num_quantizers_B = self.resolve_num_quantizers(num_quantizers_B, codes)
        with full_precision(codes.device.type):
            dtype = to_fp32(self.dummy).dtype
            parts = [
                self.quantizer(level).lookup(level_codes, dtype)
                for level, level_codes in enumerate(codes.unbind(-1))
            ]
            if num_quantizers_B is not None:
                num_quantizers = num_quantizers_B.reshape(-1, *[1] * (codes.ndim - 1))
                parts = [part * (num_quantizers > level) for level, part in enumerate(parts)]
            return self.out_proj(torch.stack(parts).sum(0)).to(self.dummy.dtype)

    @torch.no_grad()
    def batch_stats(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Tensor:
        positions = self.position_mask(latent, mask)
        num_quantizers_B = self.resolve_num_quantizers(num_quantizers_B, latent)
        with full_precision(latent.device.type):
            rows_PW = self.project_in(latent, positions)
            return torch.cat(
                [
                    output.quantizer.compute_stats(output.rows, output.used, positions.count)
                    for output in self.quantize_levels(rows_PW, positions, num_quantizers_B)
                ]
            )

    def set_global_stats(self, total_S: Tensor | None) -> None:
        count = self.num_quantizers
        totals = [None] * count if total_S is None else total_S.chunk(count)
        for level, total in enumerate(totals):
            self.quantizer(level).set_global_stats(total)

    def sample_num_quantizers(self, u_B: Tensor) -> Tensor:
        """Return how many quantizers each example uses, given a uniform number in [0, 1) for each.

        The caller draws the numbers from the examples' own generators.
        """
        if self.config.dropout == 0:
            return torch.full_like(u_B, self.num_quantizers, dtype=torch.long)
        num_quantizers_B = 1 + (u_B / self.config.dropout * self.num_quantizers).long()
        return num_quantizers_B.clamp_max(self.num_quantizers)

    def codebooks(self) -> Tensor | None:
        levels = [self.quantizer(level).codebooks() for level in range(self.num_quantizers)]
        return torch.cat([one for one in levels if one is not None])

    def bound(self, rows_PW: Tensor) -> Tensor:
        return self.quantizer(0).bound(rows_PW)

    def quantize_levels(
        self, rows_PW: Tensor, positions: PositionMask, num_quantizers_B: Tensor | None
    ) -> Iterator[LevelOutput]:
        """Quantize level by level, each the rows that use it. Gradients reach every remainder."""
        for level in range(self.num_quantizers):
            quantizer, used = self.quantizer(level), positions
            if num_quantizers_B is not None:
                used = positions.of_examples(num_quantizers_B > level)
            codes_P = quantizer.nearest(rows_PW)
            quantized_PW = used.zero_others(quantizer.lookup(codes_P, rows_PW.dtype))
            yield LevelOutput(quantizer, used, rows_PW, used.zero_others(codes_P), quantized_PW)
            rows_PW = rows_PW - quantized_PW.detach()

    def mean_penalties(
        self, outputs: list[LevelOutput], positions: PositionMask
    ) -> dict[str, Tensor]:
        """Average the penalties over levels, so that weights do not depend on their number."""
        return average_penalties(
            [
                one.quantizer.penalties(one.rows, one.quantized, one.used, positions.count)
                for one in outputs
            ]
        )

    def accumulate_level_stats(self, outputs: list[LevelOutput]) -> None:
        """Accumulate statistics down to the first level whose codebook is not initialized.

        Below it, remainders are not meaningful yet. In eval mode there are none to accumulate.
        """
        if not self.training:
            return
        for output in outputs:
            output.quantizer.accumulate_stats(output.rows, output.codes, output.used)
            if not output.quantizer.is_initialized:
                break

    def quantizer(self, level: int) -> Quantizer:
        return cast(Quantizer, self.quantizers[level])

    def resolve_num_quantizers(
        self, num_quantizers_B: Tensor | None, batch: Tensor
    ) -> Tensor | None:
        """Check the number of quantizers of each example; None uses all of them."""
        if num_quantizers_B is not None:
            check_num_quantizers(num_quantizers_B, len(batch), self.num_quantizers)
        return num_quantizers_B


@dataclass
class LevelOutput:
    """What one level computes; its codes and quantized rows are zero where it is not used."""

    quantizer: Quantizer
    used: PositionMask
    rows: Tensor
    codes: Tensor
    quantized: Tensor


def check_num_quantizers(
    num_quantizers_B: Tensor, batch_size: int, max_quantizers: int, noun: str = "quantizers"
) -> None:
    """Raise a ValueError unless there is a valid number of quantizers for each example.

    Values are checked on the CPU only, where they can be read without waiting, and not in a
    compiled graph.
    """
    if num_quantizers_B.shape != (batch_size,) or (
        can_read(num_quantizers_B)
        and not 1 <= int(num_quantizers_B.min()) <= int(num_quantizers_B.max()) <= max_quantizers
    ):
        raise ValueError(
            f"num_quantizers_B is {num_quantizers_B.tolist()} for a batch of {batch_size}: give one"
            f" number of {noun} per example, from 1 to {max_quantizers}."
        )


def average_penalties(penalties: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average penalties by name."""
    return {name: torch.stack([one[name] for one in penalties]).mean() for name in penalties[0]}

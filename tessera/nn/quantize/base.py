"""The interface of all quantizers and the arithmetic that they share.

A quantizer maps continuous latents to integer codes and codes back to latents. Each kind (FSQ, LFQ,
VQ, SimVQ) defines three operations on rows of its code dimension: `bound` maps a row into the range
of the codes, `nearest` finds its code, and `lookup` returns the vector of a code. The rest is
implemented here once: projections, padding, precision, estimated gradients, and the exchange of
statistics between micro-batches. `residual.py` stacks several quantizers of one kind.

Rows of padded positions are computed too and have no effect. Leaving them out would need the number
of valid positions on the host, which would have to wait for the device, and shapes that differ from
batch to batch.

Shape suffixes: B examples, D latent dimension, P positions of the batch, W code dimension, V
vocabulary size, L number of residual quantizers, S length of the statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.quantize.entropy import Count, scale
from tessera.nn.quantize.geometry import rotate

GradientEstimator = Literal["straight_through", "rotation"]
"""How the gradient of a quantized latent becomes that of the latent."""


@dataclass
class Quantized:
    """The output of a quantizer."""

    latent: Tensor
    """(B, ..., D): the quantized latents, with estimated gradients to the input. Zero at masked
    positions."""
    codes: Tensor
    """(B, ...) int64 in [0, vocab_size); residual: (B, ..., L). Zero at masked positions and at
    dropped levels."""
    penalties: dict[str, Tensor]
    """Weighted scalars whose sum is added to the loss. Empty for quantizers without an auxiliary
    loss (FSQ)."""


class Quantizer(nn.Module):
    """Base class of all quantizers.

    Micro-batches and processes together form one batch, so a penalty that is not a plain mean over
    examples needs statistics of all of them. `batch_stats` computes the share of one micro-batch,
    the caller sums the shares over micro-batches and processes, and `set_global_stats` receives the
    sum before the losses are computed. `needs_global_stats` is True if this exchange is required.
    When padding is uneven, the exchange also makes the plain means exact.
    """

    num_quantizers: int = 1
    needs_global_stats: bool = False
    gradient: GradientEstimator = "straight_through"
    """How gradients of the codes reach the latent, see `attach_gradients`."""
    has_quantizer_dropout: bool = False
    """Whether a training example may be encoded by its first few quantizers only. The caller then
    draws how many."""

    def __init__(self, *, dim: int, code_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.dim, self.code_dim, self.vocab_size = dim, code_dim, vocab_size
        self.in_proj: nn.Module = Projection(dim, code_dim) if dim != code_dim else nn.Identity()
        self.out_proj: nn.Module = Projection(code_dim, dim) if dim != code_dim else nn.Identity()
        self.global_stats_S: Tensor | None = None
        # Holds the device and the dtype that decode() uses.
        self.register_buffer("dummy", torch.empty(0), persistent=False)
        self.dummy: Tensor

    def forward(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Quantized:
        """Quantize latents (B, ..., D); mask (B, ...) is True at valid positions.

        Masked positions have no effect: their latent and their code are returned as zero, whatever
        their input is. `num_quantizers_B` applies to several quantizers (`residual.py`) and is
        ignored by a single one.
        """
        positions = self.position_mask(latent, mask)
        with full_precision(latent.device.type):
            rows_PW = self.project_in(latent, positions)
            codes_P = self.nearest(rows_PW)
            quantized_PW = self.lookup(codes_P, rows_PW.dtype)
            penalties = self.penalties(rows_PW, quantized_PW, positions, positions.count)
            self.accumulate_stats(rows_PW, codes_P, positions)
            rows_PD = self.out_proj(attach_gradients(rows_PW, quantized_PW, self.gradient))
        return Quantized(
            positions.scatter(rows_PD.to(latent.dtype)), positions.scatter(codes_P), penalties
        )

    def decode(self, codes: Tensor) -> Tensor:
        """Return the latents (B, ..., D) of codes (B, ...).

        They equal `forward(...).latent` at valid positions.
        """
        self.check_codes(codes)
        with full_precision(codes.device.type):
            quantized = self.lookup(codes, to_fp32(self.dummy).dtype)
            return self.out_proj(quantized).to(self.dummy.dtype)

    @torch.no_grad()
    def batch_stats(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Tensor:
        """Compute the additive statistics (S,) of one micro-batch, without side effects."""
        positions = self.position_mask(latent, mask)
        with full_precision(latent.device.type):
            rows_PW = self.project_in(latent, positions)
            return self.compute_stats(rows_PW, positions, positions.count)

    def set_global_stats(self, total_S: Tensor | None) -> None:
        """Set the sum of `batch_stats` over all micro-batches and processes of this step.

        None: each batch uses its own statistics. The sum is used in train mode only, so it does not
        affect a validation between two steps.
        """
        self.global_stats_S = total_S

    def codebooks(self) -> Tensor | None:
        """Return the vectors of all codes, (L, V, W) for L quantizers.

        None if a code has no vector of its own.
        """
        codes = torch.arange(self.vocab_size, device=self.dummy.device)
        return self.lookup(codes, to_fp32(self.dummy).dtype).detach()[None]

    # Defined by each kind of quantizer, on rows (P, W) of positions.

    def bound(self, rows_PW: Tensor) -> Tensor:
        """Map rows into the range of the codes, differentiably."""
        return rows_PW

    def nearest(self, rows_PW: Tensor) -> Tensor:
        """Return the code (P,) of each row."""
        raise NotImplementedError

    def lookup(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the vectors (..., W) of codes (...)."""
        raise NotImplementedError

    def penalties(
        self, rows_PW: Tensor, quantized_PW: Tensor, used: PositionMask, num_positions: Count
    ) -> dict[str, Tensor]:
        """Compute the weighted auxiliary losses over the used rows.

        `num_positions` counts the valid positions of the batch. With quantizer dropout, a residual
        level may use fewer rows than that.
        """
        return {}

    def accumulate_stats(self, rows_PW: Tensor, codes_P: Tensor, used: PositionMask) -> None:
        """Accumulate what a codebook without gradients needs for its update."""

    def compute_stats(self, rows_PW: Tensor, used: PositionMask, num_positions: Count) -> Tensor:
        """Compute additive statistics (S,) of the used rows.

        The sums of the kind come first; the last three entries count the used rows, the valid
        positions and the micro-batches.
        """
        counts = (used.count, num_positions, 1)
        return torch.stack([rows_PW.new_zeros(()) + count for count in counts])

    @property
    def is_initialized(self) -> bool:
        """Whether the codebook is initialized; the next residual level waits for it."""
        return True

    # Shared by all kinds.

    def position_mask(self, latent: Tensor, mask: Tensor | None) -> PositionMask:
        """Check the shapes of a latent and its mask, and return the valid positions."""
        if latent.ndim < 2 or latent.shape[-1] != self.dim:
            raise ValueError(
                f"A latent of shape {tuple(latent.shape)} was given to a quantizer with"
                f" dim={self.dim}: give it as (batch, ..., {self.dim}), channels last, or build the"
                f" quantizer with dim={latent.shape[-1]}."
            )
        if mask is not None and (mask.shape != latent.shape[:-1] or mask.dtype != torch.bool):
            raise ValueError(
                f"A mask of shape {tuple(mask.shape)} and dtype {mask.dtype} was given with a"
                f" latent of shape {tuple(latent.shape)}: give a bool mask of shape"
                f" {tuple(latent.shape[:-1])} that is True at valid positions."
            )
        mask_P = None if mask is None else mask.reshape(-1)
        return PositionMask(latent.shape[:-1], mask_P)

    def project_in(self, latent: Tensor, positions: PositionMask) -> Tensor:
        """Project positions to bounded rows (P, W) of the code dimension."""
        return self.bound(self.in_proj(to_fp32(positions.select(latent))))

    def check_codes(self, codes: Tensor) -> None:
        """Raise a ValueError if a code is outside the vocabulary; compiled graphs do not check."""
        if torch.compiler.is_compiling():
            return
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.vocab_size:
            raise ValueError(
                f"Codes between {int(codes.min())} and {int(codes.max())} were given to a quantizer"
                f" with {self.vocab_size} codes, which range from 0 to {self.vocab_size - 1}: use"
                " the quantizer that encoded them, and remove mask and end tokens before decoding."
            )

    @property
    def step_stats_S(self) -> Tensor | None:
        """The statistics of the whole step in train mode, if they were set."""
        return self.global_stats_S if self.training else None

    def mean_over_positions(self, total: Tensor, num_positions: Count) -> Tensor:
        """Turn a sum over rows into a share of the mean over positions.

        The caller averages losses over micro-batches. With global statistics the share is weighted
        such that this average is the mean over all valid positions, even if padding gives the
        micro-batches different numbers of them.
        """
        if self.step_stats_S is None:
            return scale(total, 1, num_positions)
        _, all_positions, num_batches = self.step_stats_S[-3:]
        return total * (num_batches / all_positions.clamp_min(1))

    def squared_distance(
        self, rows_PW: Tensor, target_PW: Tensor, used: PositionMask, num_positions: Count
    ) -> Tensor:
        """Return the mean squared distance of rows to targets, with gradients to the rows only."""
        distance_P = (rows_PW - target_PW.detach()).square().mean(-1)
        return self.mean_over_positions(used.zero_others(distance_P).sum(), num_positions)


class Projection(nn.Linear):
    """A linear layer that computes in the precision of its input.

    A model cast to half precision then still chooses its codes in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class PositionMask:
    """Which positions of a batch (B, ...) are valid, and used by a quantizer.

    `select` returns positions as rows, and `scatter` rows as positions, both with zeros where the
    mask is False.
    """

    def __init__(self, shape: torch.Size, mask_P: Tensor | None) -> None:
        self.shape, self.mask_P = shape, mask_P
        """The mask of all positions, flattened; None if all are used."""
        self.count: Count = prod(shape) if mask_P is None else mask_P.sum()
        """The number of used positions: with a mask a tensor, which the host need not read."""

    def of_examples(self, used_B: Tensor) -> PositionMask:
        """Return the mask in which no position of the other examples is used."""
        used_P = used_B[:, None].expand(len(used_B), prod(self.shape[1:])).reshape(-1)
        mask_P = used_P if self.mask_P is None else self.mask_P & used_P
        return PositionMask(self.shape, mask_P)

    def zero_others(self, rows: Tensor) -> Tensor:
        """Return rows (P, ...) with zeros at the positions that are not used."""
        if self.mask_P is None:
            return rows
        return rows.where(self.mask_P.view(-1, *[1] * (rows.ndim - 1)), rows.new_zeros(()))

    def select(self, latent: Tensor) -> Tensor:
        """Return a latent (B, ..., D) as rows (P, D)."""
        return self.zero_others(latent.reshape(-1, latent.shape[-1]))

    def scatter(self, rows: Tensor) -> Tensor:
        """Return rows (P, ...) at their positions (B, ...)."""
        return self.zero_others(rows).reshape(*self.shape, *rows.shape[1:])

    def sample_per_example(self, rows_PC: Tensor, count: int) -> Tensor:
        """Return `count` evenly spaced used rows (B, count, C) of each example; zeros where an
        example has fewer.

        Rows are chosen within each example, so the choice does not depend on how examples are
        distributed over micro-batches and processes. The shape does not depend on the data, so that
        processes can exchange it.
        """
        rows_BTC = rows_PC.unflatten(0, (self.shape[0], -1))
        batch_size, length = rows_BTC.shape[:2]
        if self.mask_P is None:
            size_B1 = torch.full((batch_size, 1), length, device=rows_PC.device)
        else:
            size_B1 = self.mask_P.view(batch_size, length).sum(1, keepdim=True)
        index_R = torch.arange(count, device=rows_PC.device)
        offset_BR = index_R * size_B1.clamp_min(count) // count
        exists_BR = offset_BR < size_B1
        offset_BR = offset_BR.where(exists_BR, 0)
        if self.mask_P is not None:  # the used rows of an example, in their order
            used_first_BT = self.mask_P.view(batch_size, length).logical_not().long()
            offset_BR = used_first_BT.argsort(dim=1, stable=True).gather(1, offset_BR)
        index_BRC = offset_BR.unsqueeze(2).expand(-1, -1, rows_BTC.shape[2])
        return rows_BTC.gather(1, index_BRC).where(exists_BR.unsqueeze(2), rows_PC.new_zeros(()))


def attach_gradients(rows: Tensor, quantized: Tensor, estimator: GradientEstimator) -> Tensor:
    """Return the quantized rows, with gradients to the rows.

    The straight-through estimator copies the gradient of a code to its row. The rotation trick
    (Fifty et al. 2024, arXiv 2410.06424) regards the code as the row, rotated and scaled by
    constants, so the gradient is rotated back: the angle between code and gradient is kept.

    The difference is taken between the rows and themselves, where it is exactly zero (the usual
    `rows + (quantized - rows)` rounds), so decode() returns exactly the same numbers. A row that is
    not finite gives NaN, which the engine's check for finite values relies on.
    """
    zero = rows - rows.detach()
    if estimator == "rotation":
        zero = rotate(zero, rows.detach(), quantized.detach())
    return quantized.detach() + zero

"""The interface of all quantizers and the arithmetic that they share.

A quantizer maps continuous latents to integer codes and codes back to latents. Each kind (FSQ, LFQ,
VQ) defines three operations on rows of its code dimension: `bound` maps a row into the range of the
codes, `nearest` finds its code, and `lookup` returns the vector of a code. The rest is implemented
here once: projections, padding, precision, straight-through gradients, and the exchange of
statistics between micro-batches. `residual.py` stacks several quantizers of one kind.

Shape suffixes: B examples, D latent dimension, P valid (not padded) positions of the batch, W code
dimension, V vocabulary size, L number of residual quantizers, S length of the statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.precision import full_precision, to_fp32


@dataclass
class Quantized:
    """The output of a quantizer."""

    latent: Tensor
    """(B, ..., D): the quantized latents, with straight-through gradients to the input. Zero at
    masked positions."""
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
            penalties = self.penalties(rows_PW, quantized_PW, positions.count)
            self.accumulate_stats(rows_PW, codes_P, positions.per_example_B)
            rows_PD = self.out_proj(straight_through(rows_PW, quantized_PW))
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
            return self.compute_stats(self.project_in(latent, positions), positions.count)

    def set_global_stats(self, total_S: Tensor | None) -> None:
        """Set the sum of `batch_stats` over all micro-batches and processes of this step.

        None: each batch uses its own statistics. The sum is used in train mode only, so it does not
        affect a validation between two steps.
        """
        self.global_stats_S = total_S

    def codebook(self) -> Tensor | None:
        """Return the vectors (V, W) of all codes, or None if a code has no vector of its own.

        The latter is the case for several residual quantizers.
        """
        codes = torch.arange(self.vocab_size, device=self.dummy.device)
        return self.lookup(codes, to_fp32(self.dummy).dtype).detach()

    # Defined by each kind of quantizer, on rows (P, W) of valid positions.

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
        self, rows_PW: Tensor, quantized_PW: Tensor, num_positions: int
    ) -> dict[str, Tensor]:
        """Compute the weighted auxiliary losses.

        `num_positions` counts the valid positions of the batch. With quantizer dropout, a residual
        level may receive fewer rows than that.
        """
        return {}

    def accumulate_stats(self, rows_PW: Tensor, codes_P: Tensor, per_example_B: Tensor) -> None:
        """Accumulate what a codebook without gradients needs for its update.

        Example b has the next `per_example_B[b]` rows.
        """

    def compute_stats(self, rows_PW: Tensor, num_positions: int) -> Tensor:
        """Compute additive statistics (S,).

        The sums of the kind come first; the last three entries count the rows, the valid positions
        and the micro-batches.
        """
        return rows_PW.new_tensor([len(rows_PW), num_positions, 1])

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
        return PositionMask(latent.shape[:-1], mask, latent.device)

    def project_in(self, latent: Tensor, positions: PositionMask) -> Tensor:
        """Project the valid positions to bounded rows (P, W) of the code dimension."""
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

    def mean_weight(self, num_positions: int) -> float | Tensor:
        """Return the factor that turns a sum over rows into a share of the mean over positions.

        The caller averages losses over micro-batches. With global statistics the share is weighted
        such that this average is the mean over all valid positions, even if padding gives the
        micro-batches different numbers of them.
        """
        if self.step_stats_S is None:
            return 1 / max(num_positions, 1)
        _, all_positions, num_batches = self.step_stats_S[-3:]
        return num_batches / all_positions.clamp_min(1)

    def commitment_loss(self, rows_PW: Tensor, quantized_PW: Tensor, num_positions: int) -> Tensor:
        """Return the mean squared distance of rows to their codes, with gradients to the rows."""
        distance_P = (rows_PW - quantized_PW.detach()).square().mean(-1)
        return distance_P.sum() * self.mean_weight(num_positions)


class Projection(nn.Linear):
    """A linear layer that computes in the precision of its input.

    A model cast to half precision then still chooses its codes in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class PositionMask:
    """The valid positions of a batch (B, ...).

    `select` returns them as rows, and `scatter` writes rows back, with zeros at masked positions.
    """

    def __init__(self, shape: torch.Size, mask: Tensor | None, device: torch.device) -> None:
        self.shape = shape
        self.mask = None if mask is None else mask.reshape(-1)
        self.count = prod(shape) if mask is None else int(mask.sum())
        per_example = prod(shape[1:])
        self.per_example_B = (
            torch.full(shape[:1], per_example, device=device)
            if mask is None
            else mask.reshape(shape[0], per_example).sum(1)
        )

    def select(self, latent: Tensor) -> Tensor:
        """Return the valid positions of a latent (B, ..., D) as rows (P, D)."""
        rows = latent.reshape(-1, latent.shape[-1])
        return rows if self.mask is None else rows[self.mask]

    def scatter(self, rows: Tensor) -> Tensor:
        """Return rows (P, ...) at their positions (B, ...), with zeros at masked positions."""
        rows = rows if self.mask is None else scatter_rows(rows, self.mask)
        return rows.reshape(*self.shape, *rows.shape[1:])


def scatter_rows(rows: Tensor, mask: Tensor) -> Tensor:
    """Place rows where the mask is True and zeros elsewhere."""
    scattered = rows.new_zeros(len(mask), *rows.shape[1:])
    scattered[mask] = rows
    return scattered


def straight_through(rows: Tensor, quantized: Tensor) -> Tensor:
    """Return the quantized rows, with gradients to the rows.

    The difference is taken between the rows and themselves, where it is exactly zero (the usual
    `rows + (quantized - rows)` rounds), so decode() returns exactly the same numbers. A row that is
    not finite gives NaN, which the engine's check for finite values relies on.
    """
    return quantized.detach() + (rows - rows.detach())


def l2_normalize(rows: Tensor) -> Tensor:
    """Project rows onto the unit sphere.

    Rows shorter than 1e-6 have no meaningful direction, and a smaller epsilon would make their
    gradients very large.
    """
    return F.normalize(rows, dim=-1, eps=1e-6)

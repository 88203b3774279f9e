"""What every quantizer is: continuous latents in; symbols, and the latents that those symbols stand
for, out.

A kind of quantizer (FSQ, LFQ, VQ) says how one row of its own narrow width is brought into its
range, which symbol is nearest to it, and what a symbol stands for. Everything else stands here
once: projections, padding, precision, straight-through gradients, and what micro-batches have to
tell each other. The residual form arranges several of a kind into a cascade.

Letters: B examples, D width of the latent, P real (unpadded) places of the batch, W width in which
symbols are chosen, V vocabulary, L levels of a residual cascade, S length of a statistic.
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
    """What became of a latent."""

    latent: Tensor
    """(B, ..., D): what the symbols stand for; gradients pass straight through to the input. Zero
    at masked places."""
    codes: Tensor
    """(B, ...) int64 in [0, vocabulary); residual: (B, ..., L). Zero at masked places and at
    dropped levels."""
    penalties: dict[str, Tensor]
    """Weighted scalars; their sum belongs in the loss. Empty where nothing needs coaxing (FSQ)."""


class Quantizer(nn.Module):
    """The contract of all quantizers, and the arithmetic they share.

    Several micro-batches and processes are one batch: a penalty that is not a plain mean over
    examples first asks all of them. `batch_stats` gives one micro-batch's share of the answer, the
    caller sums the shares over micro-batches and processes, and `set_global_stats` hands the sum
    back before the losses are computed. `needs_global_stats` says whether the question needs to be
    asked at all; with padding of uneven amounts it makes the plain means exact too.
    """

    levels: int = 1
    needs_global_stats: bool = False
    has_quantizer_dropout: bool = False
    """Whether a training example may be written in its first few levels only: its caller then draws
    how many."""

    def __init__(self, *, dim: int, code_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.dim, self.code_dim, self.vocab_size = dim, code_dim, vocab_size
        self.project_in: nn.Module = Projection(dim, code_dim) if dim != code_dim else nn.Identity()
        self.project_out: nn.Module = (
            Projection(code_dim, dim) if dim != code_dim else nn.Identity()
        )
        self.expected_S: Tensor | None = None
        self.register_buffer(
            "like", torch.empty(0), persistent=False
        )  # tells decode() its device and precision
        self.like: Tensor

    def forward(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Quantized:
        """Latents (B, ..., D) as symbols; mask (B, ...) is True where a place is real and not
        padding.

        Masked places take no part in anything: their latent and their code come back as zero,
        whatever stood there. `num_quantizers_B` is for several levels (`residual.py`); of one level
        nothing can be left out.
        """
        places = self.places(latent, mask)
        with full_precision(latent.device.type):
            rows_PW = self.native(latent, places)
            codes_P = self.nearest(rows_PW)
            values_PW = self.values(codes_P, rows_PW.dtype)
            penalties = self.penalties(rows_PW, values_PW, places.count)
            self.accumulate_stats(rows_PW, codes_P, places.per_example_B)
            rows_PD = self.project_out(straight_through(rows_PW, values_PW))
        return Quantized(places.put(rows_PD.to(latent.dtype)), places.put(codes_P), penalties)

    def decode(self, codes: Tensor) -> Tensor:
        """The latents (B, ..., D) that codes (B, ...) stand for: `forward(...).latent` wherever the
        place was real."""
        self.check_codes(codes)
        with full_precision(codes.device.type):
            return self.project_out(self.values(codes, to_fp32(self.like).dtype)).to(
                self.like.dtype
            )

    @torch.no_grad()
    def batch_stats(
        self, latent: Tensor, mask: Tensor | None = None, *, num_quantizers_B: Tensor | None = None
    ) -> Tensor:
        """This micro-batch's share (S,) of what `set_global_stats` wants; shares are to be added.
        Changes nothing."""
        places = self.places(latent, mask)
        with full_precision(latent.device.type):
            return self.statistic(self.native(latent, places), places.count)

    def set_global_stats(self, total_S: Tensor | None) -> None:
        """The sum of `batch_stats` over every micro-batch and process of this step; None: each
        batch stands for itself.

        Only train mode listens, so that a validation between two steps never meets a total that is
        not its own.
        """
        self.expected_S = total_S

    def table(self) -> Tensor | None:
        """What each symbol stands for, (V, W); None where a symbol says nothing by itself, as in a
        cascade."""
        every = torch.arange(self.vocab_size, device=self.like.device)
        return self.values(every, to_fp32(self.like).dtype).detach()

    # What a kind of quantizer says of itself, on rows (P, W) of real places.

    def bound(self, rows_PW: Tensor) -> Tensor:
        """Rows brought into the range of the symbols, differentiably."""
        return rows_PW

    def nearest(self, rows_PW: Tensor) -> Tensor:
        """The code (P,) of each row."""
        raise NotImplementedError

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """What codes (...) stand for, (..., W)."""
        raise NotImplementedError

    def penalties(self, rows_PW: Tensor, values_PW: Tensor, places: int) -> dict[str, Tensor]:
        """Weighted scalars. `places` counts the batch's real places; in a cascade, fewer may have
        come this deep."""
        return {}

    def accumulate_stats(self, rows_PW: Tensor, codes_P: Tensor, per_example_B: Tensor) -> None:
        """Kinds that learn outside the gradient take notes here; example b owns the next
        `per_example_B[b]` rows."""

    def statistic(self, rows_PW: Tensor, places: int) -> Tensor:
        """(S,), additive: a kind's own sums, and last: rows that took part, real places,
        micro-batches."""
        return rows_PW.new_tensor([len(rows_PW), places, 1])

    @property
    def ready(self) -> bool:
        """Whether the symbols already mean something; a level below waits for it."""
        return True

    # What the kinds share.

    def places(self, latent: Tensor, mask: Tensor | None) -> PositionMask:
        if latent.ndim < 2 or latent.shape[-1] != self.dim:
            raise ValueError(
                f"a latent of shape {tuple(latent.shape)} came to a quantizer of width {self.dim}: give it as"
                f" (batch, ..., {self.dim}), channels last, or build the quantizer with dim={latent.shape[-1]}"
            )
        if mask is not None and (mask.shape != latent.shape[:-1] or mask.dtype != torch.bool):
            raise ValueError(
                f"a mask of shape {tuple(mask.shape)} and type {mask.dtype} came with a latent of shape"
                f" {tuple(latent.shape)}: give a bool mask of shape {tuple(latent.shape[:-1])}, True at real places"
            )
        return PositionMask(latent.shape[:-1], mask, latent.device)

    def native(self, latent: Tensor, places: PositionMask) -> Tensor:
        """The real places as rows (P, W), in the range where symbols are chosen."""
        return self.bound(self.project_in(to_fp32(places.pick(latent))))

    def check_codes(self, codes: Tensor) -> None:
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.vocab_size:
            raise ValueError(
                f"codes between {int(codes.min())} and {int(codes.max())} came to a quantizer with {self.vocab_size}"
                f" symbols, which knows 0 to {self.vocab_size - 1}: they are another quantizer's, or hold a mask or end"
                " symbol that must be left out"
            )

    @property
    def whole_S(self) -> Tensor | None:
        """The statistic of the whole step, if it is known and this is a step."""
        return self.expected_S if self.training else None

    def mean_weight(self, places: int) -> float | Tensor:
        """The factor that makes a sum over rows this micro-batch's share of a mean over all real
        places.

        The caller averages losses over micro-batches. So where the whole step is known, the share
        is weighted such that this average is the mean over all places, also when padding left the
        micro-batches with uneven numbers of them.
        """
        if self.whole_S is None:
            return 1 / max(places, 1)
        _, all_places, batches = self.whole_S[-3:]
        return batches / all_places.clamp_min(1)

    def mean_distance(self, rows_PW: Tensor, values_PW: Tensor, places: int) -> Tensor:
        """How far rows are from what their symbols stand for: the mean square, which moves the rows
        alone."""
        return (rows_PW - values_PW.detach()).square().mean(-1).sum() * self.mean_weight(places)


class Projection(nn.Linear):
    """A linear layer that keeps the precision of its input, so that a model cast to half still
    chooses in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class PositionMask:
    """The real places of a batch (B, ...): picks them out as rows, and puts rows back among
    zeros."""

    def __init__(self, shape: torch.Size, mask: Tensor | None, device: torch.device) -> None:
        self.shape = shape
        self.real = None if mask is None else mask.reshape(-1)
        self.count = prod(shape) if mask is None else int(mask.sum())
        each = prod(shape[1:])
        self.per_example_B = (
            torch.full(shape[:1], each, device=device)
            if mask is None
            else mask.reshape(shape[0], each).sum(1)
        )

    def pick(self, latent: Tensor) -> Tensor:
        rows = latent.reshape(-1, latent.shape[-1])
        return rows if self.real is None else rows[self.real]

    def put(self, rows: Tensor) -> Tensor:
        rows = rows if self.real is None else among_zeros(rows, self.real)
        return rows.reshape(*self.shape, *rows.shape[1:])


def among_zeros(rows: Tensor, where: Tensor) -> Tensor:
    """Rows at the places where the mask is True, zeros elsewhere."""
    spread = rows.new_zeros(len(where), *rows.shape[1:])
    spread[where] = rows
    return spread


def straight_through(rows: Tensor, values: Tensor) -> Tensor:
    """The values, with the gradient of the rows.

    The difference is taken on the rows alone, where it is exactly zero (the usual `rows + (values -
    rows)` rounds), so that decode() gives the very same numbers. A row that is not finite makes it
    NaN, as the engine's guard needs.
    """
    return values.detach() + (rows - rows.detach())


def unit(rows: Tensor) -> Tensor:
    """Rows on the unit sphere. Below a length of 1e-6 there is no direction, and a lower floor
    makes gradients vast."""
    return F.normalize(rows, dim=-1, eps=1e-6)

"""Vector quantization (van den Oord et al. 2017, arXiv 1711.00937): a symbol is a row of a learnt
table.

Symbols are looked up in few dimensions and on the unit sphere, which keeps nearly all of them in
use (LlamaGen, arXiv 2406.06525; DAC, arXiv 2306.06546). The table is no parameter: each row is the
moving average of the latents that chose it (1711.00937, appendix A.1, eq. 6 to 8); a latent is
drawn to its row by the commitment penalty (eq. 3).

**Nothing moves during forward.** In train mode forward only takes notes: how many rows chose each
symbol, their sum, and a sample of the rows themselves. The engine ends every step with one of

    settle(meeting, step)    the step was finite: the notes of all processes meet, and the table moves alike on all
    discard()                the step was skipped: the notes are thrown away

so a batch that is not finite never reaches the table, four micro-batches are one batch, and
replicas stay equal. A `dist` has `sum(tensor)`, over processes, and `rows(tensor)`, which joins
tensors (examples, ...) of all processes in the order of the global batch.

- The first settle starts the table by k-means on the sample. In a cascade a level waits until the
  level above has started: what a random table leaves over says nothing about what a good one will.
- A symbol whose average count falls far below its even share is revived: it becomes a row of the
  batch, chosen by a generator seeded with the step, and *its averages are reset with it*. With
  stale averages the next update would pull it straight back to where it died (espnet PR 6284).

The notes are plain attributes and no buffers: DistributedDataParallel overwrites buffers with those
of rank 0 at each forward, which would count the first process several times and the others never.
Forward must run once per micro-batch, so this module does not belong inside activation
checkpointing.

Letters: B examples, P rows, W code dimensions, C = W + 1 (a row with a mark), V symbols, R sampled
rows per example, M rows of the whole sample, K centres.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tessera.nn.quantize.base import Quantizer, unit

SAMPLE_PER_EXAMPLE = 256
K_MEANS_ROUNDS = 10
SCORES_AT_ONCE = 2**24


class ProcessGroup(Protocol):
    """How processes agree. Both are called on all of them, in the same order."""

    def sum(self, tensor: Tensor) -> Tensor: ...

    def rows(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class VQConfig:
    """A learnt table of symbols, each the moving average of the latents that chose it."""

    codebook_size: int = 1024
    """Symbols."""
    code_dim: int = 8
    """Width in which symbols are looked up. A residual cascade refines this same space: give it
    more, such as 32."""
    normalised: bool = True
    """Latents and symbols on the unit sphere, nearest by angle."""
    decay: float = 0.99
    """How much of its averages a symbol keeps at each step."""
    commitment_weight: float = 0.25
    """Weight of the squared distance between a latent and its symbol."""
    expire_below: float = 0.1
    """A symbol used less than this fraction of an even share is revived from the batch; 0:
    never."""

    def __post_init__(self) -> None:
        if type(self.codebook_size) is not int or self.codebook_size < 2:
            raise ValueError(
                f"a VQ codebook of {self.codebook_size!r} symbols can tell nothing apart: use 2 or more, such as 1024"
            )
        least, where = (2, "on a sphere ") if self.normalised else (1, "")
        if type(self.code_dim) is not int or self.code_dim < least:
            raise ValueError(
                f"VQ code_dim is {self.code_dim!r}, but symbols {where}need {least} or more dimensions: use 8, say"
            )
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"VQ decay is {self.decay}, but from 1 on the table never moves: use 0 up to below 1, such as 0.99"
            )
        if not 0 <= self.expire_below < 1:
            raise ValueError(
                f"VQ revive_below is {self.expire_below}, but it is a fraction of an even share, and about half of all"
                " symbols lie below the share itself: use 0 (never) up to below 1, such as 0.1"
            )

    def build(self, dim: int) -> VQ:
        return VQ(self, dim=dim)

    def build_level(self, number: int) -> VQ:
        """Level `number` of a cascade, in its own width. Only the first is on the sphere:
        remainders have lengths."""
        return VQ(self, dim=self.code_dim, level=number)


class VQ(Quantizer):
    def __init__(self, config: VQConfig, *, dim: int, level: int = 0) -> None:
        super().__init__(dim=dim, code_dim=config.code_dim, vocab_size=config.codebook_size)
        self.config, self.level = config, level
        self.on_sphere = config.normalised and level == 0
        self.notes: CodebookStats | None = None
        table_VW = unit(torch.randn(self.vocab_size, self.code_dim)) * 0.5**level
        self.register_buffer("table_VW", table_VW)
        self.register_buffer("average_count_V", torch.zeros(self.vocab_size))
        self.register_buffer("average_sum_VW", torch.zeros_like(table_VW))
        self.register_buffer("started", torch.tensor(False))
        self.table_VW: Tensor
        self.average_count_V: Tensor
        self.average_sum_VW: Tensor
        self.started: Tensor

    def bound(self, rows_PW: Tensor) -> Tensor:
        return unit(rows_PW) if self.config.normalised else rows_PW

    @torch.no_grad()
    def nearest(self, rows_PW: Tensor) -> Tensor:
        return nearest_rows(rows_PW, self.table_VW.to(rows_PW.dtype))

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return self.table_VW.to(dtype)[codes]

    def penalties(self, rows_PW: Tensor, values_PW: Tensor, places: int) -> dict[str, Tensor]:
        if self.config.commitment_weight == 0:
            return {}
        return {
            "commitment": self.config.commitment_weight
            * self.mean_distance(rows_PW, values_PW, places)
        }

    @property
    def ready(self) -> bool:
        return bool(self.started)

    @torch.no_grad()
    def accumulate_stats(self, rows_PW: Tensor, codes_P: Tensor, per_example_B: Tensor) -> None:
        if not self.training:
            return
        marked_PC = marked(rows_PW)
        total_VC = sums_by(codes_P, marked_PC, self.vocab_size)
        sample_BRC = sample_of(marked_PC, per_example_B)
        if self.notes is None:
            self.notes = CodebookStats(total_VC, [sample_BRC])
        else:
            self.notes.total_VC += total_VC
            self.notes.samples.append(sample_BRC)

    def rollback(self) -> None:
        """Throw the notes of this step away: it was skipped, or it has been settled."""
        self.notes = None

    @torch.no_grad()
    def commit(self, dist: ProcessGroup, step: int) -> None:
        """Move the table by what all processes noted in this step. Call once per finite step, on
        all of them."""
        if self.notes is None:
            return
        total_VC = dist.all_reduce_sum(self.notes.total_VC).to(self.table_VW)
        chance = torch.Generator().manual_seed(step * 4096 + self.level)
        if not self.started:
            self.start(self.notes.meet(dist), total_VC[:, -1].sum(), chance)
        else:
            self.ema_update(total_VC)
            expired = self.expired()
            if len(expired):  # the same on all processes, so all of them ask for rows, or none does
                self.expire_codes(expired, self.notes.meet(dist), chance)
        self.rollback()

    def start(self, rows_MW: Tensor, hits: Tensor, chance: torch.Generator) -> None:
        """The table by k-means. With fewer rows than symbols each row becomes one, and the rest
        wait to be revived."""
        if len(rows_MW) == 0:
            return
        centres_KW = some_of(rows_MW, self.vocab_size, chance)
        for _ in range(K_MEANS_ROUNDS):
            total_KC = sums_by(nearest_rows(rows_MW, centres_KW), marked(rows_MW), len(centres_KW))
            centres_KW = self.centres(total_KC, otherwise=centres_KW)
        self.place(
            torch.arange(len(centres_KW)), centres_KW, total_KC[:, -1] * (hits / len(rows_MW))
        )
        self.started.fill_(True)

    def ema_update(self, total_VC: Tensor) -> None:
        """The moving averages, and the table after them. A symbol that nobody chose stays exactly
        where it is."""
        self.average_sum_VW.lerp_(total_VC[:, :-1], 1 - self.config.decay)
        self.average_count_V.lerp_(total_VC[:, -1], 1 - self.config.decay)
        average_VC = torch.cat([self.average_sum_VW, self.average_count_V.unsqueeze(1)], dim=1)
        chosen_V1 = total_VC[:, -1:] > 0
        self.table_VW.copy_(self.centres(average_VC * chosen_V1, otherwise=self.table_VW))

    def expired(self) -> Tensor:
        """The symbols used far less than an even share. Relative, since counts per step depend on
        the batch."""
        return (
            (self.average_count_V < self.config.expire_below * self.average_count_V.mean())
            .nonzero()
            .flatten()
        )

    def expire_codes(self, expired: Tensor, rows_MW: Tensor, chance: torch.Generator) -> None:
        """Dead symbols become rows of the batch with an even share to live on; where rows are too
        few, others wait."""
        rows = some_of(rows_MW, len(expired), chance)
        self.place(expired[: len(rows)], rows, self.average_count_V.mean())

    def place(self, tokens: Tensor, rows: Tensor, counts: Tensor) -> None:
        """Let these symbols be these rows, and their averages agree with it."""
        counts = counts.expand(len(tokens)).to(self.average_count_V)
        rows = rows.to(self.table_VW)
        self.table_VW[tokens] = rows
        self.average_count_V[tokens] = counts
        self.average_sum_VW[tokens] = rows * counts.unsqueeze(1)

    def centres(self, total_VC: Tensor, *, otherwise: Tensor) -> Tensor:
        """The mean of the rows behind each total, on the sphere if need be; where there were none,
        what was."""
        sums, counts = total_VC[:, :-1], total_VC[:, -1:]
        means = sums / counts.clamp_min(torch.finfo(counts.dtype).tiny)
        return torch.where(counts > 0, unit(means) if self.on_sphere else means, otherwise)


@dataclass
class CodebookStats:
    """What forward saw since the last settle or discard."""

    total_VC: Tensor
    """Sums of the rows that chose each symbol; the last column, their marks, counts them."""
    samples: list[Tensor]
    """Per micro-batch (B, R, C); marked 1 where there is a row, 0 where the example had too few."""

    def meet(self, dist: ProcessGroup) -> Tensor:
        """The sampled rows (M, W) of all micro-batches and processes, in the order of the global
        batch."""
        rows_MC = dist.all_gather_rows(torch.cat(self.samples)).flatten(0, 1)
        return rows_MC[rows_MC[:, -1] > 0, :-1]


def nearest_rows(rows_PW: Tensor, table_VW: Tensor) -> Tensor:
    """The number (P,) of the table row closest to each row: |r - t|^2 is least where r.t - |t|^2 /
    2 is greatest.

    In chunks, since rows times symbols is by far the largest tensor that a quantizer could make.
    """
    offset_V = table_VW.square().sum(-1) / 2
    chunks = rows_PW.split(max(1, SCORES_AT_ONCE // len(table_VW)))
    return torch.cat([(chunk @ table_VW.T - offset_V).argmax(-1) for chunk in chunks])


def marked(rows_PW: Tensor) -> Tensor:
    """Rows with a 1 appended, so that whoever sums them also counts them."""
    return torch.cat([rows_PW, rows_PW.new_ones(len(rows_PW), 1)], dim=1)


def sums_by(codes_P: Tensor, rows_PC: Tensor, vocab_size: int) -> Tensor:
    """The sum (V, C) of the rows that chose each symbol."""
    return rows_PC.new_zeros(vocab_size, rows_PC.shape[1]).index_add_(0, codes_P, rows_PC)


def some_of(rows_MW: Tensor, most: int, chance: torch.Generator) -> Tensor:
    """At most so many different rows. Drawn on the CPU, so that a seed means the same on any
    device."""
    return rows_MW[torch.randperm(len(rows_MW), generator=chance)[:most].to(rows_MW.device)]


def sample_of(marked_PC: Tensor, per_example_B: Tensor) -> Tensor:
    """R rows (B, R, C) of each example, evenly spread over it; zeros, so unmarked, where it has
    fewer.

    The choice is made within each example, so that it does not depend on how examples are dealt to
    micro-batches and processes, and the shape does not depend on the data, so that processes can
    exchange it.
    """
    size_B1 = per_example_B.unsqueeze(1)
    number_R = torch.arange(SAMPLE_PER_EXAMPLE, device=marked_PC.device)
    within_BR = number_R * size_B1.clamp_min(SAMPLE_PER_EXAMPLE) // SAMPLE_PER_EXAMPLE
    index_BR = torch.where(
        within_BR < size_B1, size_B1.cumsum(0) - size_B1 + within_BR, len(marked_PC)
    )
    return torch.cat([marked_PC, marked_PC.new_zeros(1, marked_PC.shape[1])])[index_BR]

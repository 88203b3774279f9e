"""Vector quantization (van den Oord et al. 2017, arXiv 1711.00937): a code is a row of a learned
codebook.

Codes are looked up in few dimensions and on the unit sphere, which keeps nearly all of them in use
(LlamaGen, arXiv 2406.06525; DAC, arXiv 2306.06546). The codebook is not a parameter: each row is
the exponential moving average of the latents that are assigned to it (1711.00937, appendix A.1, eq.
6 to 8); the commitment penalty pulls a latent toward its row (eq. 3).

**The codebook does not change during forward.** In train mode, forward only accumulates statistics:
how many rows are assigned to each code, their sum, and a sample of the rows. The engine ends every
step with one of

    commit(dist, step)    the step was finite: the statistics of all processes are combined, and the
                          codebook is updated identically on all of them
    rollback()            the step was skipped: the statistics are discarded

so a batch that is not finite never reaches the codebook, four micro-batches are equivalent to one
batch, and replicas stay identical.

- The first commit initializes the codebook by k-means on the sample. A residual level waits until
  the level above is initialized: the remainders of a random codebook are not those of a trained
  one.
- A code whose average count falls far below an even share expires: it is replaced by a row of the
  batch, chosen by a generator that is seeded with the step, and *its averages are reset with it*.
  With stale averages the next update would move it straight back (espnet PR 6284).

The statistics are plain attributes and not buffers: DistributedDataParallel overwrites buffers with
those of rank 0 at each forward, which would count the first process several times and the others
never. Forward must run once per micro-batch, so this module must not be used inside activation
checkpointing.

Shape suffixes: B examples, P rows, W code dimension, C = W + 1 (a row and a 1 that counts it), V
codes, R sampled rows per example, M rows of the whole sample, K centroids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tessera.engine.device import copy_to_device
from tessera.nn.quantize.base import GradientEstimator, PositionMask, Quantizer
from tessera.nn.quantize.entropy import Count
from tessera.nn.quantize.geometry import l2_normalize

SAMPLES_PER_EXAMPLE = 256
KMEANS_ITERATIONS = 10
MAX_SCORES = 2**24
"""Number of row-to-code scores that are computed at once."""


class ProcessGroup(Protocol):
    """Collective operations, which all processes call in the same order."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over processes."""

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        """Concatenate tensors (examples, ...) of all processes in the order of the global batch."""


@dataclass(frozen=True, kw_only=True)
class VQConfig:
    """Vector quantization: a learned codebook, updated by exponential moving averages."""

    codebook_size: int = 1024
    """Number of codes."""
    code_dim: int = 8
    """Dimension in which codes are looked up. The levels of a residual quantizer all refine this
    space, so they need more, such as 32."""
    normalised: bool = True
    """Whether latents and codes lie on the unit sphere, where the nearest code is the one with the
    smallest angle."""
    decay: float = 0.99
    """Decay of the exponential moving averages at each step."""
    commitment_weight: float = 0.25
    """Weight of the squared distance between a latent and its code."""
    expire_below: float = 0.1
    """A code that is used less than this fraction of an even share is replaced by a latent of the
    batch. 0 disables this."""
    gradient: GradientEstimator = "straight_through"
    """How gradients reach the latent: `straight_through` copies those of the code; `rotation`
    rotates and scales them as the code is rotated and scaled relative to the latent."""

    def __post_init__(self) -> None:
        if type(self.codebook_size) is not int or self.codebook_size < 2:
            raise ValueError(
                f"VQ codebook_size is {self.codebook_size!r}, but a codebook needs a whole number"
                " of codes, 2 or more: use 1024, for example."
            )
        min_dim, where = (2, "on the unit sphere ") if self.normalised else (1, "")
        if type(self.code_dim) is not int or self.code_dim < min_dim:
            raise ValueError(
                f"VQ code_dim is {self.code_dim!r}, but codes {where}need {min_dim} or more"
                " dimensions: use 8, for example."
            )
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"VQ decay is {self.decay}, but from 1 on the codebook never changes: use a value"
                " in [0, 1), such as 0.99."
            )
        if not 0 <= self.expire_below < 1:
            raise ValueError(
                f"VQ expire_below is {self.expire_below}, but it is a fraction of an even share,"
                " and about half of all codes are below the share itself: use 0 (never) up to below"
                " 1, such as 0.1."
            )

    def build(self, dim: int) -> VQ:
        return VQ(self, dim=dim)

    def build_level(self, level: int) -> VQ:
        """Build one level of a residual quantizer, without projections.

        Only the first level is on the unit sphere: remainders have different lengths.
        """
        return VQ(self, dim=self.code_dim, level=level)


class VQ(Quantizer):
    """Vector quantizer with a codebook of exponential moving averages."""

    def __init__(self, config: VQConfig, *, dim: int, level: int = 0) -> None:
        super().__init__(dim=dim, code_dim=config.code_dim, vocab_size=config.codebook_size)
        self.config, self.level, self.gradient = config, level, config.gradient
        self.on_sphere = config.normalised and level == 0
        self.stats: CodebookStats | None = None
        self._is_initialized = False
        codebook_VW = l2_normalize(torch.randn(self.vocab_size, self.code_dim)) * 0.5**level
        self.register_buffer("codebook_VW", codebook_VW)
        self.register_buffer("ema_count_V", torch.zeros(self.vocab_size))
        self.register_buffer("ema_sum_VW", torch.zeros_like(codebook_VW))
        self.register_buffer("initialized", torch.tensor(False))
        self.codebook_VW: Tensor
        self.ema_count_V: Tensor
        self.ema_sum_VW: Tensor
        self.initialized: Tensor

    def bound(self, rows_PW: Tensor) -> Tensor:
        return l2_normalize(rows_PW) if self.config.normalised else rows_PW

    @torch.no_grad()
    def nearest(self, rows_PW: Tensor) -> Tensor:
        return find_nearest(rows_PW, self.codebook_VW.to(rows_PW.dtype))

    def lookup(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return self.codebook_VW.to(dtype)[codes]

    def penalties(
        self, rows_PW: Tensor, quantized_PW: Tensor, used: PositionMask, num_positions: Count
    ) -> dict[str, Tensor]:
        if self.config.commitment_weight == 0:
            return {}
        distance = self.squared_distance(rows_PW, quantized_PW, used, num_positions)
        return {"commitment": self.config.commitment_weight * distance}

    @property
    def is_initialized(self) -> bool:
        """Read the buffer until it is True, which it then stays: reading waits for the device."""
        if self.initialized.is_meta:  # of a plan, which has no values
            return True
        self._is_initialized = self._is_initialized or bool(self.initialized)
        return self._is_initialized

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._is_initialized = False

    @torch.no_grad()
    def accumulate_stats(self, rows_PW: Tensor, codes_P: Tensor, used: PositionMask) -> None:
        if not self.training:
            return
        rows_PC = used.zero_others(append_ones(rows_PW))
        total_VC = sum_by_code(codes_P, rows_PC, self.vocab_size)
        sample_BRC = used.sample_per_example(rows_PC, SAMPLES_PER_EXAMPLE)
        if self.stats is None:
            self.stats = CodebookStats(total_VC, [sample_BRC])
        else:
            self.stats.total_VC += total_VC
            self.stats.samples.append(sample_BRC)

    def rollback(self) -> None:
        """Discard the statistics of this step, which was skipped."""
        self.stats = None

    @torch.no_grad()
    def commit(self, dist: ProcessGroup, step: int) -> None:
        """Update the codebook by the statistics of all processes.

        Call it once per finite step, on all processes.
        """
        if self.stats is None:
            return
        total_VC = dist.all_reduce_sum(self.stats.total_VC).to(self.codebook_VW)
        generator = torch.Generator().manual_seed(step * 4096 + self.level)
        if not self.is_initialized:
            rows_MC = self.stats.gather_rows(dist)
            rows_MW = rows_MC[rows_MC[:, -1] > 0, :-1]
            self.init_codebook(rows_MW, total_VC[:, -1].sum(), generator)
        else:
            self.ema_update(total_VC)
            expired_V = self.find_expired()
            # On a device it is cheaper to replace nothing than to wait. Equal on all processes, so
            # that all of them gather rows, or none.
            if expired_V.device.type != "cpu" or expired_V.any():
                self.expire_codes(expired_V, self.stats.gather_rows(dist), generator)
        self.stats = None

    def init_codebook(self, rows_MW: Tensor, hits: Tensor, generator: torch.Generator) -> None:
        """Initialize the codebook by k-means.

        With fewer rows than codes, each row becomes one code and the other codes expire later.
        """
        if len(rows_MW) == 0:
            return
        centroids_KW = sample_rows(rows_MW, self.vocab_size, generator)
        for _ in range(KMEANS_ITERATIONS):
            nearest_M = find_nearest(rows_MW, centroids_KW)
            total_KC = sum_by_code(nearest_M, append_ones(rows_MW), len(centroids_KW))
            centroids_KW = self.compute_centroids(total_KC, default=centroids_KW)
        counts_K = total_KC[:, -1] * (hits / len(rows_MW))
        self.set_codes(torch.arange(len(centroids_KW)), centroids_KW, counts_K)
        self.initialized.fill_(True)

    def ema_update(self, total_VC: Tensor) -> None:
        """Update the moving averages and the codebook. A code without hits does not move."""
        self.ema_sum_VW.lerp_(total_VC[:, :-1], 1 - self.config.decay)
        self.ema_count_V.lerp_(total_VC[:, -1], 1 - self.config.decay)
        ema_VC = torch.cat([self.ema_sum_VW, self.ema_count_V.unsqueeze(1)], dim=1)
        hit_V1 = total_VC[:, -1:] > 0
        self.codebook_VW.copy_(self.compute_centroids(ema_VC * hit_V1, default=self.codebook_VW))

    def find_expired(self) -> Tensor:
        """Return (V,) bool: which codes are used far less than an even share.

        The threshold is relative, because counts per step depend on the batch size.
        """
        return self.ema_count_V < self.config.expire_below * self.ema_count_V.mean()

    def expire_codes(self, expired_V: Tensor, rows_MC: Tensor, generator: torch.Generator) -> None:
        """Replace expired codes by random rows of the batch, with an even share as their count.

        If there are too few rows, the remaining codes are replaced in a later step.
        """
        rows_MC = shuffle_rows(rows_MC, generator)
        exists_M = rows_MC[:, -1] > 0
        rows_MC = rows_MC[exists_M.logical_not().long().argsort(stable=True)]
        rank_V = expired_V.cumsum(0) - 1
        replaced_V1 = (expired_V & (rank_V < exists_M.sum())).unsqueeze(1)
        rows_VW = rows_MC[rank_V.clamp(0, len(rows_MC) - 1), :-1].to(self.codebook_VW)
        mean = self.ema_count_V.mean()
        self.codebook_VW.copy_(rows_VW.where(replaced_V1, self.codebook_VW))
        self.ema_sum_VW.copy_((rows_VW * mean).where(replaced_V1, self.ema_sum_VW))
        self.ema_count_V.copy_(mean.where(replaced_V1[:, 0], self.ema_count_V))

    def set_codes(self, codes: Tensor, rows: Tensor, counts: Tensor) -> None:
        """Set the vectors of codes, and their averages accordingly."""
        counts = counts.expand(len(codes)).to(self.ema_count_V)
        rows = rows.to(self.codebook_VW)
        self.codebook_VW[codes] = rows
        self.ema_count_V[codes] = counts
        self.ema_sum_VW[codes] = rows * counts.unsqueeze(1)

    def compute_centroids(self, total_VC: Tensor, *, default: Tensor) -> Tensor:
        """Return the mean row of each total, on the sphere if applicable, or the default if there
        were no rows."""
        sums, counts = total_VC[:, :-1], total_VC[:, -1:]
        means = sums / counts.clamp_min(torch.finfo(counts.dtype).tiny)
        return torch.where(counts > 0, l2_normalize(means) if self.on_sphere else means, default)


@dataclass
class CodebookStats:
    """Statistics of all forward passes since the last commit or rollback."""

    total_VC: Tensor
    """Sums of the rows that are assigned to each code; the last column counts them."""
    samples: list[Tensor]
    """Sampled rows (B, R, C) of each micro-batch; the last column is 1 for a row and 0 where the
    example has fewer than R."""

    def gather_rows(self, dist: ProcessGroup) -> Tensor:
        """Return the sampled rows (M, C) of all micro-batches and processes, in the order of the
        global batch."""
        return dist.all_gather_rows(torch.cat(self.samples)).flatten(0, 1)


def find_nearest(rows_PW: Tensor, codebook_VW: Tensor) -> Tensor:
    """Return the index (P,) of the codebook row closest to each row.

    |r - c|^2 is minimal where r.c - |c|^2 / 2 is maximal. The rows are processed in chunks, because
    the scores (rows times codes) would be by far the largest tensor of a quantizer.
    """
    offset_V = codebook_VW.square().sum(-1) / 2
    chunks = rows_PW.split(max(1, MAX_SCORES // len(codebook_VW)))
    return torch.cat([(chunk @ codebook_VW.T - offset_V).argmax(-1) for chunk in chunks])


def append_ones(rows_PW: Tensor) -> Tensor:
    """Append a column of ones, so that a sum of rows also counts them."""
    return torch.cat([rows_PW, rows_PW.new_ones(len(rows_PW), 1)], dim=1)


def sum_by_code(codes_P: Tensor, rows_PC: Tensor, vocab_size: int) -> Tensor:
    """Return the sum (V, C) of the rows of each code."""
    return rows_PC.new_zeros(vocab_size, rows_PC.shape[1]).index_add_(0, codes_P, rows_PC)


def sample_rows(rows_MW: Tensor, max_rows: int, generator: torch.Generator) -> Tensor:
    """Return at most `max_rows` different rows."""
    return shuffle_rows(rows_MW, generator)[:max_rows]


def shuffle_rows(rows_M: Tensor, generator: torch.Generator) -> Tensor:
    """Return the rows in a random order, drawn on the CPU so that it is the same on any device."""
    order = torch.randperm(len(rows_M), generator=generator)
    return rows_M[copy_to_device(order, rows_M.device)]

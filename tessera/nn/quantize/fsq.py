"""Finite scalar quantization (Mentzer et al. 2023, arXiv 2309.15505): every dimension takes one of
a few values.

Nothing is learnt and nothing can collapse. A dimension with n bins has its range (-1, 1) cut into n
equal cells, a symbol stands for the centres of its cells, and the code writes the cells in mixed
radix, first dimension least significant (section 3).

The bound is not the paper's tanh(z) with rounding but tanh(0.851 z) with equal cells: 2
sigmoid(1.702 z) - 1 is the logistic curve closest to the Gaussian distribution function, so a
Gaussian latent fills all bins alike (the aim of iFSQ, arXiv 2601.17124). Measured on 400,000
numbers from N(0, 1): entropy of bin use over its maximum, and the rarest bin's share times the
number of bins:

    bins                                        3             4             5             8            16
    tanh, rounded (the paper)             .987 0.87     .961 0.50     .993 0.83     .989 0.63     .992 0.66
    2 sigmoid(1.6 z) - 1, rounded         .942 0.74     .949 0.63     .957 0.56     .970 0.44     .982 0.28
    2 sigmoid(1.702 z) - 1, equal cells   .999 0.95     .999 0.96     1.00 0.94     .999 0.94     .999 0.89
    erf(z / sqrt 2), equal cells          1.00 1.00     1.00 1.00     1.00 1.00     1.00 0.99     1.00 0.99

(Rounding to 0 .. n - 1 leaves the two outer bins half as wide as the others.) The error function is
a little more even still, but its slope at z = 4 is 1/14 of the logistic one's and at z = 6 it is
gone: a latent that strays there would not come back. Equal cells also make the residual form exact:
what a cell leaves over fills a range 1/n as wide, evenly, so the next level is the same grid, n
times finer.

Filling each dimension's bins is not yet using all their combinations: pictures are mostly
background, and a short training run leaves the rest of the grid empty. Hence the optional diversity
penalty, the entropy of the mean soft assignment that LFQ has (MAGVIT-v2, arXiv 2310.05737). After
300 steps on 2,000 toy pictures of 64 x 64, 16 x 16 symbols each, batch 8, squared error, 200 held
out, one seed:

    symbols    weight    in use    perplexity    PSNR
    256        0          22 %          13      20.2 dB
    256        0.003      89 %         126      20.5 dB
    256        0.01      100 %         218      20.4 dB
    1000       0.01      100 %         885      22.3 dB

Letters: P rows, W dimensions, V symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log2, prod

import torch
from torch import Tensor

from tessera.nn.quantize.base import Quantizer
from tessera.nn.quantize.entropy import entropy_of_mean

SLOPE = 1.702 / 2
SHARPNESS = 4.0
"""Of soft assignment, in squared bins: at the border of two cells both have a half, in the middle
of one it has 0.96."""
LARGEST_TABLE = 2**16
LARGEST_VOCABULARY = 2**62
"""Codes are int64."""


@dataclass(frozen=True, kw_only=True)
class FSQConfig:
    """Round every dimension to a few values; the codebook is their grid."""

    levels: tuple[int, ...] = (8, 8, 8, 8)
    """Bins of each dimension; the vocabulary is their product (8, 8, 8, 8: 4096 symbols)."""
    diversity: float = 0.0
    """Weight of a penalty on uneven use of the symbols, which is nothing when all are used alike; 0
    is as published."""

    def __post_init__(self) -> None:
        if not self.levels or any(type(bins) is not int or bins < 2 for bins in self.levels):
            raise ValueError(
                f"FSQ levels are {self.levels!r}, but every dimension needs a whole number of bins, two or more:"
                " (8, 8, 8, 8) gives 4096 symbols, (8, 5, 5, 5) gives 1000"
            )
        if self.diversity and prod(self.levels) > LARGEST_TABLE:
            raise ValueError(
                f"FSQ levels {self.levels!r} make {prod(self.levels)} symbols, and their even use is measured in a table of"
                f" all of them: use at most {LARGEST_TABLE} symbols, or a diversity of 0"
            )
        if prod(self.levels) > LARGEST_VOCABULARY:
            raise ValueError(
                f"FSQ levels {self.levels!r} make {prod(self.levels)} symbols, more than a 64 bit code can number:"
                " use fewer dimensions or fewer bins, or a residual cascade of small ones"
            )

    def build(self, dim: int) -> FSQ:
        return FSQ(self, dim=dim)

    def build_level(self, number: int) -> FSQ:
        """Level `number` of a cascade, in its own width: the grid of the level above, finer by the
        number of bins."""
        bins = max(self.levels)
        if bins ** (number + 1) > 2**24:
            raise ValueError(
                f"{number + 1} residual levels of {bins} bins ask for {bins}^{number + 1} steps in one dimension, but a"
                f" 32 bit float tells 2^24 apart: use {int(24 / log2(bins))} levels or fewer, or fewer bins"
            )
        return FSQ(self, dim=len(self.levels), level=number)


class FSQ(Quantizer):
    def __init__(self, config: FSQConfig, *, dim: int, level: int = 0) -> None:
        super().__init__(dim=dim, code_dim=len(config.levels), vocab_size=prod(config.levels))
        self.config = config
        self.needs_global_stats = config.diversity != 0
        bins_W = torch.tensor(config.levels)
        radix_W = torch.tensor([prod(config.levels[:i]) for i in range(self.code_dim)])
        self.register_buffer("bins_W", bins_W, persistent=False)
        self.register_buffer("radix_W", radix_W, persistent=False)
        self.register_buffer("cells_per_range_W", bins_W ** (level + 1), persistent=False)
        self.bins_W: Tensor
        self.radix_W: Tensor
        self.cells_per_range_W: Tensor

    def bound(self, rows_PW: Tensor) -> Tensor:
        return torch.tanh(SLOPE * rows_PW)

    def nearest(self, rows_PW: Tensor) -> Tensor:
        cells_PW = (rows_PW * self.cells_per_range_W + self.bins_W).div(2).floor().long()
        # A saturated tanh is 1, one past the last cell. Clamped after long(), since NaN as an
        # integer may be anything.
        return (cells_PW.clamp_min(0).minimum(self.bins_W - 1) * self.radix_W).sum(-1)

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        cells = codes.unsqueeze(-1) // self.radix_W % self.bins_W
        return (2 * cells + 1 - self.bins_W).to(dtype) / self.cells_per_range_W

    def penalties(self, rows_PW: Tensor, values_PW: Tensor, places: int) -> dict[str, Tensor]:
        if not self.config.diversity:
            return {}
        evenness = entropy_of_mean([self.code_sums(rows_PW)], len(rows_PW), places, self.whole_S)
        return {"diversity": self.config.diversity * (log(self.vocab_size) - evenness)}

    def statistic(self, rows_PW: Tensor, places: int) -> Tensor:
        return torch.cat([self.code_sums(rows_PW), super().statistic(rows_PW, places)])

    def code_sums(self, rows_PW: Tensor) -> Tensor:
        """(V,): the probability of every symbol, softly assigned, summed over the rows; dimensions
        are independent."""
        cells_PW = (
            rows_PW * self.cells_per_range_W + self.bins_W - 1
        ) / 2  # in bins, 0 at the middle of the first
        shares = [
            torch.softmax(
                -SHARPNESS
                * (cells_P.unsqueeze(1) - torch.arange(bins, device=cells_P.device)).square(),
                dim=1,
            )
            for cells_P, bins in zip(cells_PW.unbind(1), self.config.levels)
        ]
        middle = len(shares) // 2
        return (joint(shares[middle:], rows_PW).T @ joint(shares[:middle], rows_PW)).flatten()


def joint(shares: list[Tensor], rows_PW: Tensor) -> Tensor:
    """(P, product of bins): the probability of every combination, the first dimension least
    significant."""
    together = rows_PW.new_ones(len(rows_PW), 1)
    for share_PB in shares:
        together = (share_PB.unsqueeze(2) * together.unsqueeze(1)).flatten(1)
    return together

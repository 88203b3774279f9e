"""Finite scalar quantization (Mentzer et al. 2023, arXiv 2309.15505): each dimension takes one of a
few values.

There is no learned codebook, so none can collapse. A dimension with n bins divides its range
(-1, 1) into n equal cells, a code represents the centers of its cells, and the code numbers the
cells in mixed radix, first dimension least significant (section 3).

The bound is not the paper's tanh(z) with rounding but tanh(0.851 z) with equal cells: 2
sigmoid(1.702 z) - 1 is the logistic curve closest to the Gaussian distribution function, so a
Gaussian latent fills all bins evenly (the aim of iFSQ, arXiv 2601.17124). Measured on 400,000
numbers from N(0, 1): the entropy of bin usage relative to its maximum, and the fraction of the
rarest bin times the number of bins:

    bins                                        3          4          5          8         16
    tanh, rounded (the paper)             .987 0.87  .961 0.50  .993 0.83  .989 0.63  .992 0.66
    2 sigmoid(1.6 z) - 1, rounded         .942 0.74  .949 0.63  .957 0.56  .970 0.44  .982 0.28
    2 sigmoid(1.702 z) - 1, equal cells   .999 0.95  .999 0.96  1.00 0.94  .999 0.94  .999 0.89
    erf(z / sqrt 2), equal cells          1.00 1.00  1.00 1.00  1.00 1.00  1.00 0.99  1.00 0.99

(Rounding to 0 .. n - 1 leaves the two outer bins half as wide as the others.) The error function is
slightly more even still, but its slope at z = 4 is 1/14 of the logistic curve's and at z = 6 it
vanishes, so a latent that drifts there would not return. Equal cells also make the residual form
exact: the remainder within a cell fills a range 1/n as wide, evenly, so the next level is the same
grid, n times finer.

Even usage of each dimension's bins does not imply that all combinations are used: images are mostly
background, and a short training run leaves the rest of the grid empty. The optional diversity
penalty addresses this. It is based on the entropy of the mean soft assignment, as in LFQ
(MAGVIT-v2, arXiv 2310.05737). After 300 steps on 2,000 synthetic images of 64 x 64, 16 x 16 tokens
each, batch 8, squared error, 200 held out, one seed:

    codes      weight    in use    perplexity    PSNR
    256        0          22 %          13      20.2 dB
    256        0.003      89 %         126      20.5 dB
    256        0.01      100 %         218      20.4 dB
    1000       0.01      100 %         885      22.3 dB

Shape suffixes: P rows, W dimensions, V codes, N bins of one dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log2, prod

import torch
from torch import Tensor

from tessera.nn.quantize.base import PositionMask, Quantizer
from tessera.nn.quantize.entropy import Count, batch_entropy

SLOPE = 1.702 / 2
SHARPNESS = 4.0
"""Sharpness of the soft assignment, in squared bins: at the border of two cells both have a
probability of 0.5, and at the center of a cell it has 0.96."""
MAX_DIVERSITY_CODES = 2**16
"""The diversity penalty holds one probability for each code."""
MAX_VOCAB_SIZE = 2**62
"""Codes are int64."""


@dataclass(frozen=True, kw_only=True)
class FSQConfig:
    """Finite scalar quantization: each dimension is rounded to a few values."""

    levels: tuple[int, ...] = (8, 8, 8, 8)
    """Number of bins of each dimension. The vocabulary size is their product (8, 8, 8, 8: 4096
    codes)."""
    diversity: float = 0.0
    """Weight of a penalty on uneven code usage, which is zero when all codes are used equally. The
    paper has no such penalty (0)."""

    def __post_init__(self) -> None:
        if not self.levels or any(type(bins) is not int or bins < 2 for bins in self.levels):
            raise ValueError(
                f"FSQ levels are {self.levels!r}, but each dimension needs a whole number of bins,"
                " two or more: (8, 8, 8, 8) gives 4096 codes, (8, 5, 5, 5) gives 1000."
            )
        if self.diversity and prod(self.levels) > MAX_DIVERSITY_CODES:
            raise ValueError(
                f"FSQ levels {self.levels!r} give {prod(self.levels)} codes, and the diversity"
                " penalty needs one probability for each: use at most"
                f" {MAX_DIVERSITY_CODES} codes, or set diversity to 0."
            )
        if prod(self.levels) > MAX_VOCAB_SIZE:
            raise ValueError(
                f"FSQ levels {self.levels!r} give {prod(self.levels)} codes, more than a 64 bit"
                " integer can represent: use fewer dimensions or fewer bins, or a residual"
                " quantizer with small codebooks."
            )

    def build(self, dim: int) -> FSQ:
        return FSQ(self, dim=dim)

    def build_level(self, level: int) -> FSQ:
        """Build one level of a residual quantizer, without projections.

        Its grid is that of the level above, finer by the number of bins.
        """
        bins = max(self.levels)
        if bins ** (level + 1) > 2**24:
            raise ValueError(
                f"{level + 1} residual quantizers of {bins} bins need {bins}^{level + 1} steps in"
                " one dimension, but a 32 bit float distinguishes 2^24: use"
                f" {int(24 / log2(bins))} quantizers or fewer, or fewer bins."
            )
        return FSQ(self, dim=len(self.levels), level=level)


class FSQ(Quantizer):
    """Finite scalar quantizer."""

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
        # A saturated tanh is 1, one past the last cell. Clamp after long(), because NaN converts to
        # an arbitrary integer.
        return (cells_PW.clamp_min(0).minimum(self.bins_W - 1) * self.radix_W).sum(-1)

    def lookup(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        cells = codes.unsqueeze(-1) // self.radix_W % self.bins_W
        return (2 * cells + 1 - self.bins_W).to(dtype) / self.cells_per_range_W

    def penalties(
        self, rows_PW: Tensor, quantized_PW: Tensor, used: PositionMask, num_positions: Count
    ) -> dict[str, Tensor]:
        if not self.config.diversity:
            return {}
        prob_sums = [self.sum_code_probs(rows_PW, used)]
        entropy = batch_entropy(prob_sums, used.count, num_positions, self.step_stats_S)
        return {"diversity": self.config.diversity * (log(self.vocab_size) - entropy)}

    def compute_stats(self, rows_PW: Tensor, used: PositionMask, num_positions: Count) -> Tensor:
        counts = super().compute_stats(rows_PW, used, num_positions)
        return torch.cat([self.sum_code_probs(rows_PW, used), counts])

    def sum_code_probs(self, rows_PW: Tensor, used: PositionMask) -> Tensor:
        """Return the probabilities (V,) of all codes under soft assignment, summed over used rows.

        Given a row, its dimensions are independent.
        """
        # In bins, with 0 at the center of the first one.
        cells_PW = (rows_PW * self.cells_per_range_W + self.bins_W - 1) / 2
        bin_probs = [
            torch.softmax(
                -SHARPNESS
                * (cells_P.unsqueeze(1) - torch.arange(bins, device=cells_P.device)).square(),
                dim=1,
            )
            for cells_P, bins in zip(cells_PW.unbind(1), self.config.levels)
        ]
        middle = len(bin_probs) // 2
        high = joint_probs(bin_probs[middle:], rows_PW)
        low = joint_probs(bin_probs[:middle], rows_PW)
        return (used.zero_others(high).T @ low).flatten()


def joint_probs(bin_probs: list[Tensor], rows_PW: Tensor) -> Tensor:
    """Return the probabilities (P, product of bins) of all combinations of bins.

    The first dimension is the least significant.
    """
    joint = rows_PW.new_ones(len(rows_PW), 1)
    for probs_PN in bin_probs:
        joint = (probs_PN.unsqueeze(2) * joint.unsqueeze(1)).flatten(1)
    return joint

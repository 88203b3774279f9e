"""SimVQ (Zhu et al. 2024, arXiv 2411.02038): the codebook is a fixed random table times a learned
linear map.

In a learned codebook only the codes that are chosen move, so those that no latent is close to stay
where they are. Here one linear map moves all codes together: the gradient of the chosen codes
changes the basis of the whole table. There is nothing to initialize, average or replace, and the
map is trained like any other layer, by two penalties: `codebook` moves the codes toward the
latents, and `commitment` the latents toward the codes (eq. 3 of van den Oord et al. 2017, arXiv
1711.00937).

The map starts as the identity, so the first codebook is the table itself: Gaussian vectors with a
mean square length of 1.

Unlike in the paper, latents and codes lie on the unit sphere by default, in few dimensions, as
those of VQ. Measured on patches of 4 x 4 pixels of 320 emoji of 64 x 64, 2,048 codes, a small
autoencoder, 500 steps of 1,024 patches, a tenth of the images held out:

    code_dim     4         8              16        32
    sphere       20.4 dB   21.4, 20.7 dB  20.6 dB   18.7 dB
    no sphere              20.7, 20.4 dB            19.1 dB

(two seeds for 8 dimensions; VQ 21.2 dB, FSQ 21.1 dB.) The perplexity of the codes is 29 and 26 on
the sphere and 22 and 21 otherwise, and 74 with VQ.

Shape suffixes: P rows, W code dimension, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.quantize.base import GradientEstimator, PositionMask, Projection, Quantizer
from tessera.nn.quantize.entropy import Count
from tessera.nn.quantize.geometry import l2_normalize
from tessera.nn.quantize.vq import find_nearest


@dataclass(frozen=True, kw_only=True)
class SimVQConfig:
    """SimVQ: a fixed random codebook that one learned linear map moves as a whole."""

    codebook_size: int = 1024
    """Number of codes."""
    code_dim: int = 8
    """Dimension of the codes and of their linear map."""
    normalised: bool = True
    """Whether latents and codes lie on the unit sphere, where the nearest code is the one with the
    smallest angle."""
    codebook_weight: float = 1.0
    """Weight of the squared distance between a code and its latents, which trains the linear
    map."""
    commitment_weight: float = 0.25
    """Weight of the squared distance between a latent and its code."""
    gradient: GradientEstimator = "straight_through"
    """How gradients reach the latent: `straight_through` copies those of the code; `rotation`
    rotates and scales them as the code is rotated and scaled relative to the latent."""

    def __post_init__(self) -> None:
        if type(self.codebook_size) is not int or self.codebook_size < 2:
            raise ValueError(
                f"SimVQ codebook_size is {self.codebook_size!r}, but a codebook needs a whole"
                " number of codes, 2 or more: use 1024, for example."
            )
        min_dim, where = (2, "on the unit sphere ") if self.normalised else (1, "")
        if type(self.code_dim) is not int or self.code_dim < min_dim:
            raise ValueError(
                f"SimVQ code_dim is {self.code_dim!r}, but codes {where}need {min_dim} or more"
                " dimensions: use 8, for example."
            )
        if self.codebook_weight <= 0:
            raise ValueError(
                f"SimVQ codebook_weight is {self.codebook_weight}, but without it the codebook is"
                " not trained: use a value above 0, such as 1."
            )

    def build(self, dim: int) -> SimVQ:
        return SimVQ(self, dim=dim)

    def build_level(self, level: int) -> SimVQ:
        """Build one level of a residual quantizer, without projections.

        Each level has a table and a map of its own, and starts at half the length of the level
        above. Only the first level is on the unit sphere: remainders have different lengths.
        """
        return SimVQ(self, dim=self.code_dim, level=level)


class SimVQ(Quantizer):
    """Vector quantizer whose codebook is a fixed table times a learned linear map."""

    def __init__(self, config: SimVQConfig, *, dim: int, level: int = 0) -> None:
        super().__init__(dim=dim, code_dim=config.code_dim, vocab_size=config.codebook_size)
        self.config, self.gradient = config, config.gradient
        self.on_sphere = config.normalised and level == 0
        table_VW = torch.randn(self.vocab_size, self.code_dim) * self.code_dim**-0.5
        self.register_buffer("table_VW", table_VW * 0.5**level)
        self.table_VW: Tensor
        self.table_map = Projection(self.code_dim, self.code_dim)
        nn.init.eye_(self.table_map.weight)
        nn.init.zeros_(self.table_map.bias)

    def bound(self, rows_PW: Tensor) -> Tensor:
        return l2_normalize(rows_PW) if self.config.normalised else rows_PW

    @torch.no_grad()
    def nearest(self, rows_PW: Tensor) -> Tensor:
        return find_nearest(rows_PW, self.map_table(rows_PW.dtype))

    def lookup(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        # All codes are mapped, and not only the given ones: the rounding of a product depends on
        # its number of rows, and the vector of a code must not depend on the batch.
        return F.embedding(codes, self.map_table(dtype))

    def map_table(self, dtype: torch.dtype) -> Tensor:
        """Return the vectors (V, W) of all codes, with gradients to the map."""
        codebook_VW = self.table_map(self.table_VW.to(dtype))
        return l2_normalize(codebook_VW) if self.on_sphere else codebook_VW

    def penalties(
        self, rows_PW: Tensor, quantized_PW: Tensor, used: PositionMask, num_positions: Count
    ) -> dict[str, Tensor]:
        to_latents = self.squared_distance(quantized_PW, rows_PW, used, num_positions)
        penalties = {"codebook": self.config.codebook_weight * to_latents}
        if self.config.commitment_weight:
            to_codes = self.squared_distance(rows_PW, quantized_PW, used, num_positions)
            penalties["commitment"] = self.config.commitment_weight * to_codes
        return penalties

"""A summary of the beginning of an example that is given: one vector, for all positions.

A masked model can read a given prefix by attention. A summary is the shorter way for what all of it
has in common, such as the voice of a prompt: an embedding of the speaker that is trained with the
model (as in Jia 2018, arXiv 1806.04558, where it is trained separately). Mean and standard
deviation over positions are those of x-vectors (Snyder 2018, "X-vectors: robust DNN embeddings for
speaker recognition"). Without a prefix the summary is zero, and so it is at initialization.

B batch, N positions, S tokens per position, W model dimension, E dimension of the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.nn.conformer import ConvolutionBlock
from tessera.nn.init import zero_init_
from tessera.nn.precision import to_fp32
from tessera.nn.token_embedding import TokenEmbedding, TokenSpec, pad_for_batch_invariance
from tessera.nn.transformer import Norm, linear

MIN_VARIANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class PrefixEncoderConfig:
    dim: int = 128
    """Dimension of the encoder."""
    depth: int = 2
    """Number of convolution blocks."""
    kernel: int = 5
    """Positions of a convolution, an odd number."""

    def __post_init__(self) -> None:
        if min(self.dim, self.depth) < 1:
            raise ValueError(f"dim and depth must be at least 1, got {self.dim} and {self.depth}.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd and at least 1, got {self.kernel}.")

    def build(self, tokens: TokenSpec, dim: int) -> PrefixEncoder:
        return PrefixEncoder(self, tokens, dim)


@dataclass
class Prefix:
    """The tokens that are given at the beginning of each example."""

    tokens_BNS: Tensor
    mask_BN: Tensor
    """True at the positions of the prefix; tokens of other positions are ignored."""

    @classmethod
    def find(cls, tokens_BNS: Tensor, hidden_BNS: Tensor) -> Prefix:
        """Return the positions before the first one with a hidden token."""
        return cls(tokens_BNS, leading_positions(~hidden_BNS.any(2)))


def leading_positions(given_BN: Tensor) -> Tensor:
    """Return which positions come before the first one that is False."""
    return given_BN.long().cumprod(1).bool()


class PrefixEncoder(nn.Module):
    def __init__(self, config: PrefixEncoderConfig, tokens: TokenSpec, dim: int):
        super().__init__()
        slots = tokens.layout.tokens_per_position
        self.embedding = TokenEmbedding(tokens.vocab_size, slots, config.dim, tokens.features)
        self.blocks = nn.ModuleList(
            ConvolutionBlock(config.kernel, config.dim) for _ in range(config.depth)
        )
        self.norm = Norm(config.dim)
        self.out = zero_init_(linear(2 * config.dim, dim))

    def forward(self, prefix: Prefix) -> Tensor:
        """Return (B, 1, W), zero for examples without a prefix."""
        mask_BN = prefix.mask_BN
        x_BNE = self.embedding(prefix.tokens_BNS.where(mask_BN[..., None], 0))
        for block in self.blocks:
            x_BNE = block(x_BNE, mask_BN)
        statistics_B2E = pool_statistics(to_fp32(self.norm(x_BNE)), mask_BN).to(x_BNE.dtype)
        rows = pad_for_batch_invariance(statistics_B2E)
        return self.out(rows)[: len(statistics_B2E), None]


def pool_statistics(x_BNE: Tensor, mask_BN: Tensor) -> Tensor:
    """Return mean and standard deviation over the masked positions, (B, 2 E); zero without any."""
    mask_BN1 = mask_BN[..., None]
    count_B1 = mask_BN.sum(1, keepdim=True).clamp_min(1)
    mean_BE = (x_BNE * mask_BN1).sum(1) / count_B1
    variance_BE = ((x_BNE - mean_BE[:, None]).square() * mask_BN1).sum(1) / count_B1
    deviation_BE = (variance_BE + MIN_VARIANCE).sqrt()
    return torch.cat([mean_BE, deviation_BE], dim=1) * mask_BN.any(1, keepdim=True)

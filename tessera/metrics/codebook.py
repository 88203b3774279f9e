"""Codebook metrics, from the counts of codes, (..., V), V codes. Each row is a codebook."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def codebook_usage(counts: Tensor) -> Tensor:
    """Return the fraction of codes that occur at all, (...)."""
    return (counts > 0).double().mean(-1)


def codebook_perplexity(counts: Tensor) -> Tensor:
    """Return the exponential of the entropy of the codes, (...).

    It is between 1 and V, which is reached if all codes occur equally often. It is 1 if nothing was
    counted.
    """
    probs = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.special.entr(probs).sum(-1).exp()


def codebook_histogram(counts: Tensor, bins: int = 64) -> Tensor:
    """Return how often codes occur, the most frequent first, as means of at most `bins` bins."""
    ordered = counts.double().sort(-1, descending=True).values
    rows = ordered.reshape(-1, 1, ordered.shape[-1])
    means = torch.nn.functional.adaptive_avg_pool1d(rows, min(bins, ordered.shape[-1]))
    return means.reshape(*ordered.shape[:-1], -1)


def codebook_bits(counts: Tensor) -> Tensor:
    """Return the bits that take all counted codes to store, without compression."""
    return counts.sum() * math.log2(counts.shape[-1])

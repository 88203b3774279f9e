"""Retrieval metrics: ranks, recall at chance level, and AUC.

N pairs, D embedding dimension. Examples with the same caption are not candidates for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tessera.losses.contrastive import negative_mask
from tessera.nn.precision import to_fp32

ROWS_PER_BLOCK = 1024
"""Rows of the similarity matrix that are computed at a time: it is large for a validation set."""


def retrieval_ranks(queries_ND: Tensor, keys_ND: Tensor, caption_ids_N: Tensor) -> Tensor:
    """Return the rank of the matching key among all candidates, 1 for the first, (N,).

    A tie counts half, so that a model with constant embeddings is at chance level.
    """
    ranks = []
    for rows in blocks(len(queries_ND)):
        scores = to_fp32(queries_ND[rows]) @ to_fp32(keys_ND).T
        positive = scores[torch.arange(len(scores)), rows][:, None]
        negative = negative_mask(caption_ids_N[rows], caption_ids_N)
        above = ((scores > positive) & negative).sum(1)
        ranks.append(1 + above + ((scores == positive) & negative).sum(1) / 2)
    return torch.cat(ranks)


def recall_at_chance(caption_ids_N: Tensor, k: int) -> Tensor:
    """Return the expected recall at k of random ranks."""
    candidates = [
        negative_mask(caption_ids_N[rows], caption_ids_N).sum(1) + 1
        for rows in blocks(len(caption_ids_N))
    ]
    return (k / torch.cat(candidates).double()).clamp_max(1).mean()


def auc(scores_N: Tensor, positive_N: Tensor) -> Tensor:
    """Return the probability that a positive scores higher than a negative; ties count half."""
    negatives = scores_N[~positive_N].sort().values
    below = torch.searchsorted(negatives, scores_N[positive_N], right=False) + torch.searchsorted(
        negatives, scores_N[positive_N], right=True
    )
    return below.double().mean() / 2 / max(1, len(negatives))


def blocks(count: int) -> Iterator[Tensor]:
    """Split row indices into blocks."""
    yield from torch.arange(count).split(ROWS_PER_BLOCK)

"""Contrastive losses over the matrix of all pairs of a batch.

N pairs. `logits_NN[i, j]` is the scaled cosine similarity of the first element of pair i and the
second of pair j; the diagonal holds the positives. `negatives_NN` is True for negatives: all other
pairs, except those with the same caption, because two examples with one caption should not be
pushed apart. A row without negatives does not contribute. All losses are computed in float32 or
float64 and are finite at any scale.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.nn.precision import to_fp32


def negative_mask(caption_ids: Tensor, others: Tensor | None = None) -> Tensor:
    """Return the negatives: True where two captions differ, (M, N).

    Args:
        caption_ids: ids of captions, (M,), or several for each, (M, C), which must all differ.
        others: the ids of the columns; by default the same as those of the rows.
    """
    different = caption_ids[:, None] != (caption_ids if others is None else others)[None, :]
    return different if different.ndim == 2 else different.all(-1)


def candidate_mask(negatives_NN: Tensor) -> Tensor:
    """Return the positives and the negatives, (N, N)."""
    return negatives_NN | torch.eye(len(negatives_NN), dtype=torch.bool, device=negatives_NN.device)


def softmax_contrastive_loss(logits_NN: Tensor, negatives_NN: Tensor) -> Tensor:
    """Return InfoNCE (van den Oord 2018, arXiv 1807.03748, eq. 4), averaged over both directions as
    in CLIP (Radford 2021, 2103.00020)."""
    logits_NN = to_fp32(logits_NN)
    positive_N = logits_NN.diagonal()
    candidates_NN = logits_NN.masked_fill(~candidate_mask(negatives_NN), -math.inf)
    return ((candidates_NN.logsumexp(0) + candidates_NN.logsumexp(1)) / 2 - positive_N).mean()


def decoupled_contrastive_loss(logits_NN: Tensor, negatives_NN: Tensor) -> Tensor:
    """Return InfoNCE without the positive in the denominator (Yeh 2021, arXiv 2110.06848).

    The positive then no longer reduces its own gradient, which helps with small batches. The loss
    can be negative.
    """
    logits_NN = to_fp32(logits_NN)
    positive_N = logits_NN.diagonal()
    losses = []
    for dim in (0, 1):
        # Without negatives the positive is its only candidate, and the difference is zero.
        no_negatives_N = ~negatives_NN.any(dim)
        candidates_NN = logits_NN.masked_fill(
            ~(negatives_NN | torch.diag(no_negatives_N)), -math.inf
        )
        losses.append(candidates_NN.logsumexp(dim) - positive_N)
    return torch.stack(losses).mean()


def sigmoid_contrastive_loss(logits_NN: Tensor, negatives_NN: Tensor) -> Tensor:
    """Return the binary cross-entropy of each pair (Zhai 2023, arXiv 2303.15343, section 3.2)."""
    logits_NN = to_fp32(logits_NN)
    negative_NN = torch.where(negatives_NN, F.logsigmoid(-logits_NN), 0.0)
    return -(F.logsigmoid(logits_NN.diagonal()).sum() + negative_NN.sum()) / len(logits_NN)


def loss_over_chance(logits_NN: Tensor, negatives_NN: Tensor) -> Tensor:
    """Return the softmax loss divided by that of uniform predictions: 1 is an untrained model.

    The loss of uniform predictions is ln(candidates): a batch of 512 whose loss stays at 6.238 has
    learned nothing (512 = e^6.238).
    """
    candidates_N = candidate_mask(negatives_NN).sum(1)
    chance = candidates_N.to(torch.promote_types(logits_NN.dtype, torch.float32)).log().mean()
    return softmax_contrastive_loss(logits_NN, negatives_NN) / chance.clamp_min(
        torch.finfo(chance.dtype).tiny
    )

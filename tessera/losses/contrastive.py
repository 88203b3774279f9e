"""Which of many belong together: losses over a table of all pairs, and how well such a table ranks.

N pairs. `logits_NN[i, j]` says how well first i and second j go together, by cosine times a scale;
the pairs that belong together are the diagonal. `against_NN` marks what a pair is told apart from:
all others, but not those that say the same, for a caption that stands in a batch twice is no reason
to push its two clips apart. Whoever has nothing to be told apart from takes no part. Everything is
in float32 or better, and finite at any scale: no exponential is taken of anything above 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.losses import to_fp32

AT_ONCE = 1024
"""Rows of a table of similarities that are looked at together: tables of whole held-out sets are
large."""


def apart(said_N: Tensor) -> Tensor:
    """(N, N): True where two say different things."""
    return said_N[:, None] != said_N[None, :]


def softmax_contrast(logits_NN: Tensor, against_NN: Tensor) -> Tensor:
    """Which of the seconds belongs to a first, and which first to a second: the mean cross-entropy
    of both questions.

    InfoNCE (van den Oord 2018, arXiv 1807.03748, eq. 4), asked in both directions as by CLIP
    (Radford 2021, 2103.00020).
    """
    logits_NN = to_fp32(logits_NN)
    own_N = logits_NN.diagonal()
    candidates_NN = logits_NN.masked_fill(~with_own(against_NN), -math.inf)
    return ((candidates_NN.logsumexp(0) + candidates_NN.logsumexp(1)) / 2 - own_N).mean()


def decoupled_contrast(logits_NN: Tensor, against_NN: Tensor) -> Tensor:
    """The same without the right answer among the candidates (Yeh 2021, arXiv 2110.06848): it no
    longer shrinks its own gradient, which helps where batches are small. It may fall below zero."""
    logits_NN = to_fp32(logits_NN)
    own_N = logits_NN.diagonal()
    found = []
    for dim in (0, 1):
        alone_N = ~against_NN.any(
            dim
        )  # its own similarity then stands on both sides, and it takes no part
        candidates_NN = logits_NN.masked_fill(~(against_NN | torch.diag(alone_N)), -math.inf)
        found.append(candidates_NN.logsumexp(dim) - own_N)
    return torch.stack(found).mean()


def sigmoid_contrast(logits_NN: Tensor, against_NN: Tensor) -> Tensor:
    """Of each pair by itself: does it belong together? (Zhai 2023, arXiv 2303.15343, section
    3.2)"""
    logits_NN = to_fp32(logits_NN)
    refused_NN = torch.where(against_NN, F.logsigmoid(-logits_NN), 0.0)
    return -(F.logsigmoid(logits_NN.diagonal()).sum() + refused_NN.sum()) / len(logits_NN)


def with_own(against_NN: Tensor) -> Tensor:
    return against_NN | torch.eye(len(against_NN), dtype=torch.bool, device=against_NN.device)


def loss_over_chance(logits_NN: Tensor, against_NN: Tensor) -> Tensor:
    """The softmax loss as a share of what somebody has who cannot tell any two apart: 1 is a model
    that has learnt nothing.

    That is ln(candidates), where a batch of 512 whose loss stays at 6.238 has been stuck (512 =
    e^6.238).
    """
    candidates_N = with_own(against_NN).sum(1)
    by_chance = candidates_N.to(torch.promote_types(logits_NN.dtype, torch.float32)).log().mean()
    return softmax_contrast(logits_NN, against_NN) / by_chance.clamp_min(
        torch.finfo(by_chance.dtype).tiny
    )


# ---- how well it ranks


def ranks(asking_ND: Tensor, answering_ND: Tensor, said_N: Tensor) -> Tensor:
    """(N,): the place of the right answer among all, 1 for the first. Who is as near counts half,
    so that a model to which all is one answers by chance; others who say the same are left out."""
    found = []
    for rows in blocks(len(asking_ND)):
        scores = to_fp32(asking_ND[rows]) @ to_fp32(answering_ND).T
        own = scores[torch.arange(len(scores)), rows][:, None]
        against = said_N[rows][:, None] != said_N[None, :]
        found.append(1 + ((scores > own) & against).sum(1) + ((scores == own) & against).sum(1) / 2)
    return torch.cat(found)


def recall_by_chance(said_N: Tensor, most: int) -> Tensor:
    """How often the right answer is among the first `most` of those who draw lots."""
    candidates = [
        (said_N[rows][:, None] != said_N[None, :]).sum(1) + 1 for rows in blocks(len(said_N))
    ]
    return (most / torch.cat(candidates).double()).clamp_max(1).mean()


def auc(scores_N: Tensor, is_so_N: Tensor) -> Tensor:
    """How often one of whom it is so has a higher score than one of whom it is not; equal scores
    count half."""
    others = scores_N[~is_so_N].sort().values
    below = torch.searchsorted(others, scores_N[is_so_N], right=False) + torch.searchsorted(
        others, scores_N[is_so_N], right=True
    )
    return below.double().mean() / 2 / max(1, len(others))


def blocks(count: int) -> Iterator[Tensor]:
    yield from torch.arange(count).split(AT_ONCE)

"""Metrics of a set of generated samples: quality, variety and copies, in features of any medium.

Each value is meaningful only beside that of real examples: two sets of real examples of the same
size are compared in the same way, and the difference is what the generator lacks.

N and M examples, D feature dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_PER_BLOCK = 256
"""Rows of the matrix of distances that are computed at a time."""

NEIGHBOURS = 3
"""The neighbour whose distance is the radius of an example, as in the paper."""

NEAR_DUPLICATES = 0.1
"""The fraction of the training examples that count as near-duplicates: those with the nearest other
training example."""


@dataclass(frozen=True)
class PrecisionRecall:
    precision: float
    """The fraction of samples that lie among the real examples: quality."""
    recall: float
    """The fraction of real examples that lie among the samples: variety."""


def precision_recall(
    real_ND: Tensor, fake_MD: Tensor, neighbours: int = NEIGHBOURS
) -> PrecisionRecall:
    """Compare two sets by their nearest neighbours (Kynkäänniemi 2019, arXiv 1904.06991, eq. 1).

    An example lies among a set if its distance to any member is at most the distance of that member
    to its own k-th neighbour in the set. Both values depend on the sizes of the sets: compare only
    values of equal sizes.
    """
    return PrecisionRecall(
        precision=fraction_among(real_ND, fake_MD, neighbours),
        recall=fraction_among(fake_MD, real_ND, neighbours),
    )


def fraction_among(members_ND: Tensor, queries_MD: Tensor, neighbours: int = NEIGHBOURS) -> float:
    """Return the fraction of queries within the radius of at least one member."""
    if len(members_ND) <= neighbours:
        raise ValueError(
            f"Radii of {neighbours} neighbours need more than {neighbours} examples, got "
            f"{len(members_ND)}: use a larger set."
        )
    radii_N = torch.cat(
        [  # each row contains the distance of the member to itself, the smallest
            squared_distances(rows, members_ND).kthvalue(neighbours + 1, dim=1).values
            for rows in members_ND.split(ROWS_PER_BLOCK)
        ]
    )
    inside_M = [
        (squared_distances(rows, members_ND) <= radii_N).any(1)
        for rows in queries_MD.split(ROWS_PER_BLOCK)
    ]
    return torch.cat(inside_M).double().mean().item()


# ---- copies


@dataclass(frozen=True)
class Nearest:
    """The nearest reference example of each query."""

    distance_N: Tensor
    """The Euclidean distances."""
    index_N: Tensor
    """The indices of the reference examples."""


def find_nearest(queries_ND: Tensor, references_MD: Tensor, min_distance: float = 0.0) -> Nearest:
    """Find the nearest reference example of each query, no nearer than `min_distance`.

    With a small `min_distance` a set can be compared with itself: an example is not its own
    neighbour, and neither is an exact duplicate.
    """
    found = []
    for rows in queries_ND.split(ROWS_PER_BLOCK):
        squared = squared_distances(rows, references_MD)
        found.append(squared.masked_fill(squared < min_distance**2, torch.inf).min(1))
    return Nearest(
        torch.cat([one.values for one in found]).sqrt(), torch.cat([one.indices for one in found])
    )


def near_duplicate_distance(nearest_N: Tensor, fraction: float = NEAR_DUPLICATES) -> float:
    """Return the distance up to which a training example and its nearest one are near-duplicates.

    Args:
        nearest_N: the distance of training examples to the nearest other one.
        fraction: the fraction of them that are near-duplicates.
    """
    return nearest_N.double().quantile(fraction).item()


def squared_distances(a_ND: Tensor, b_MD: Tensor) -> Tensor:
    """Return the squared Euclidean distances of all pairs, (N, M).

    In float32 the difference below leaves about 1e-6 of the squared norms for equal rows, and an
    example would not be found at distance 0 of itself.
    """
    a_ND, b_MD = a_ND.double(), b_MD.double()
    squares = a_ND.square().sum(1)[:, None] + b_MD.square().sum(1)
    return torch.addmm(squares, a_ND, b_MD.T, alpha=-2).clamp_min(0)

"""How evenly symbols are used: the entropy of their mean probabilities, over a batch or over a
whole step.

The entropy of a mean is no mean of entropies, so micro-batches and processes must hear of each
other: `whole_S` is the sum of their statistics (base.py), and the slope below makes the mean of
their gradients the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def entropy_of_mean(
    sums: list[Tensor], took_part: int, places: int, whole_S: Tensor | None
) -> Tensor:
    """The entropy of the mean distribution: over the whole step if it is known, else over this
    batch.

    `sums` are probabilities summed over the rows that took part, one table for each group of
    independent symbols; entropies of groups add up. Where a cascade lets only some places come this
    deep, it counts by their share, as means over rows do.
    """
    if whole_S is None:
        means = [part / max(took_part, 1) for part in sums]
        return sum_of(entropy(mean) for mean in means) * (took_part / max(places, 1))

    all_rows, all_places, batches = whole_S[-3:]
    means = [
        part / all_rows.clamp_min(1) for part in whole_S[:-3].split([len(part) for part in sums])
    ]
    value = sum_of(entropy(mean) for mean in means)
    slope = sum_of((-safe_log(mean) * part).sum() for mean, part in zip(means, sums, strict=True))
    slope = slope * batches / all_rows.clamp_min(1)
    return (value + slope - slope.detach()) * all_rows / all_places.clamp_min(1)


def entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * safe_log(probabilities)).sum()


def safe_log(probabilities: Tensor) -> Tensor:
    """A symbol that nobody uses has probability 0, and its slope must be steep but finite."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()

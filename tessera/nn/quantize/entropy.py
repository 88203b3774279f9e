"""The batch entropy: how evenly codes are used, over a batch or over a whole step.

The entropy of a mean distribution is not a mean of entropies, so micro-batches and processes need
the sum of their statistics (`Quantizer.set_global_stats`). With it, the linear term below makes the
mean of the micro-batches' gradients equal to the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Count = int | Tensor
"""A number of rows: a tensor where it depends on masks, so that the host need not wait for it."""


def at_least_one(count: Count) -> Count:
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)


def scale(value: Tensor, numerator: Count, denominator: Count) -> Tensor:
    """Multiply by a fraction of two counts; it is rounded as that of two Python numbers."""
    fraction = to_double(numerator) / to_double(at_least_one(denominator))
    return value * (fraction.to(value.dtype) if isinstance(fraction, Tensor) else fraction)


def to_double(count: Count) -> Count:
    """Convert a tensor to float64, which MPS devices do not have."""
    has_double = isinstance(count, Tensor) and count.device.type != "mps"
    return count.double() if has_double and isinstance(count, Tensor) else count


def batch_entropy(
    prob_sums: list[Tensor], num_rows: Count, num_positions: Count, step_stats_S: Tensor | None
) -> Tensor:
    """Compute the entropy of the mean distribution over the codes.

    The mean is over the whole step if its statistics are given, else over this batch. `prob_sums`
    holds probabilities summed over the rows, one tensor for each group of independent codes;
    entropies of groups add up. If quantizer dropout leaves fewer rows than positions, the entropy
    is scaled by the fraction of rows, as means over rows are.
    """
    if step_stats_S is None:
        means = [probs / at_least_one(num_rows) for probs in prob_sums]
        return scale(sum_scalars(entropy(mean) for mean in means), num_rows, num_positions)

    all_rows, all_positions, num_batches = step_stats_S[-3:]
    all_sums = step_stats_S[:-3].split([len(probs) for probs in prob_sums])
    means = [probs / all_rows.clamp_min(1) for probs in all_sums]
    value = sum_scalars(entropy(mean) for mean in means)
    linear = sum_scalars(
        (-safe_log(mean) * probs).sum() for mean, probs in zip(means, prob_sums, strict=True)
    )
    linear = linear * num_batches / all_rows.clamp_min(1)
    return (value + linear - linear.detach()) * all_rows / all_positions.clamp_min(1)


def entropy(probs: Tensor) -> Tensor:
    return -(probs * safe_log(probs)).sum()


def safe_log(probs: Tensor) -> Tensor:
    """Compute a logarithm whose gradient stays finite at the probability 0 of an unused code."""
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def sum_scalars(terms: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum()

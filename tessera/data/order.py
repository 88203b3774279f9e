"""The order of the training examples of a run, as a function of the position in the run.

Both orders are pure functions of (seed, position), so resuming at any step reads no earlier
example. They store the permutation of one epoch, which is computed again when another one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tessera.engine.modes import hash_seed


class Order(Protocol):
    def index(self, position: int) -> int:
        """Return the index of the example at a position."""


@dataclass
class ShuffledOrder:
    """All examples, in another permutation in each epoch."""

    count: int
    seed: int
    _epoch: int = -1
    _permutation: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def index(self, position: int) -> int:
        epoch, offset = divmod(position, self.count)
        if epoch != self._epoch:
            self._permutation = permute(self.count, self.seed, epoch)
            self._epoch = epoch
        return int(self._permutation[offset])


class BalancedOrder:
    """One example of each group in an epoch; the members of a group take turns in random order.

    Args:
        groups: The group of each example.
        seed: The seed of the order.
    """

    def __init__(self, groups: Sequence[str], seed: int):
        members: dict[str, list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault(group, []).append(index)
        self.members = list(members.values())
        self.seed = seed
        self._of_groups = ShuffledOrder(len(self.members), seed)

    def index(self, position: int) -> int:
        group = self._of_groups.index(position)
        members = self.members[group]
        cycle, turn = divmod(position // len(self.members), len(members))
        return members[int(permute(len(members), self.seed, group, cycle)[turn])]


def permute(count: int, seed: int, *parts: int) -> np.ndarray:
    """Return the permutation of a seed and further integers, such as the epoch."""
    return np.random.default_rng(hash_seed(seed, *parts)).permutation(count)

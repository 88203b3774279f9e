"""What is hidden of each example, and what else chance decides about it: all from the example's own generator.

B batch, N places, S symbols in a place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.engine.task import Batch
from tessera.sampling.schedules import Schedule, hidden_share


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    schedule: Schedule = "cosine"
    """How many symbols are hidden: the schedule at a random time, at least one."""
    keep: float = 0.0
    """The share of hidden symbols that are shown after all, and guessed all the same."""
    replace: float = 0.0
    """The share of hidden symbols in whose place another one is shown."""

    def __post_init__(self) -> None:
        if not 0 <= self.keep + self.replace <= 1 or min(self.keep, self.replace) < 0:
            raise ValueError(f"keep ({self.keep}) and replace ({self.replace}) are shares that together are at most 1.")

    def draw(self, symbols_NS: Tensor, vocabulary: int, generator: torch.Generator) -> Masked:
        """Always the same draws, so that what follows from the generator does not depend on the settings."""
        count = symbols_NS.numel()
        time = float(torch.rand((), generator=generator))
        order, fate = torch.rand(2, *symbols_NS.shape, generator=generator)
        others = torch.randint(vocabulary, symbols_NS.shape, generator=generator)
        hidden_count = max(1, round(hidden_share(self.schedule, time) * count))
        hidden = order.flatten().argsort().argsort().view(symbols_NS.shape) < hidden_count
        shown = symbols_NS.cpu().masked_fill(hidden, vocabulary)
        shown = torch.where(hidden & (fate < self.keep), symbols_NS.cpu(), shown)
        swapped = hidden & (fate >= self.keep) & (fate < self.keep + self.replace)
        return Masked(torch.where(swapped, others, shown), hidden)


@dataclass
class Masked:
    """A mosaic as the model sees it, and which symbols it has to guess."""

    shown: Tensor
    asked: Tensor


@dataclass
class Chances:
    """What is drawn for each example, from its own generator and always in the same order."""

    generators: list[torch.Generator]
    drop: list[float]
    remember: list[float]

    @classmethod
    def of(cls, batch: Batch) -> Chances:
        generators = batch.generators()
        drop, remember = torch.stack([torch.rand(2, generator=generator) for generator in generators]).T.tolist()
        return cls(generators, drop, remember)

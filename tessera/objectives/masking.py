"""What is hidden of each example, and what else chance decides about it: all from the example's own generator.

B batch, N places, S symbols in a place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.engine.task import Batch
from tessera.nn.token_layout import Layout
from tessera.sampling.schedules import Schedule, hidden_share, mean_share


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

    def suits(self, levels: int) -> None:
        """Any number of them."""

    def usual_count(self, layout: Layout) -> float:
        """How many symbols of an example are asked for, on average."""
        return layout.count * layout.slots * mean_share(self.schedule)

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


@dataclass(frozen=True, kw_only=True)
class LevelMaskingConfig:
    """For symbols in several levels, of which a finer one only says what the coarser ones left over (SoundStorm, Borsos 2023,
    arXiv 2305.09636, section 3.2): of one level some are guessed, coarser ones are seen, finer ones are not."""

    schedule: Schedule = "cosine"
    """How many symbols of the level are hidden: the schedule at a random time, at least one."""
    prompt: bool = True
    """A beginning of random length is shown in all levels: the voice that the rest is to go on in."""

    def suits(self, levels: int) -> None:
        if levels < 2:
            raise ValueError(
                "This tokenizer writes one level, so masking by levels has none to choose from: give the run of a codec of "
                "several levels (--tokenizer RUN)."
            )

    def usual_count(self, layout: Layout) -> float:
        """How many symbols of an example are asked for, on average: of one level, and after the prompt."""
        return layout.count * mean_share(self.schedule) * (0.5 if self.prompt else 1.0)

    def draw(self, symbols_NS: Tensor, vocabulary: int, generator: torch.Generator) -> Masked:
        """Always the same draws, so that what follows from the generator does not depend on the settings."""
        symbols_NS = symbols_NS.cpu()
        count, levels = symbols_NS.shape
        time, which, cut = torch.rand(3, generator=generator).tolist()
        order_N = torch.rand(count, generator=generator)
        level, begins = int(which * levels), int(cut * count) if self.prompt else 0
        after = count - begins
        hidden_count = max(1, round(hidden_share(self.schedule, time) * after))
        asked = torch.zeros_like(symbols_NS, dtype=torch.bool)
        asked[begins:, level] = order_N[begins:].argsort().argsort() < hidden_count
        finer = torch.zeros_like(asked)
        finer[begins:, level + 1 :] = True
        return Masked(symbols_NS.masked_fill(asked | finer, vocabulary), asked)


@dataclass
class Mosaic:
    """The symbols of a batch of examples, of which each may be shorter than the longest; 0 where one has ended."""

    symbols_BNS: Tensor
    lengths: list[int]
    """How many places of each are real."""

    @classmethod
    def of(cls, symbols_BNS: Tensor) -> Mosaic:
        """Of symbols that are -1 where an example has ended."""
        lengths_B = (symbols_BNS[..., 0] >= 0).sum(1)
        return cls(symbols_BNS.clamp_min(0), lengths_B.tolist())

    @property
    def whole(self) -> bool:
        return min(self.lengths) == self.symbols_BNS.shape[1]

    @property
    def real_BN(self) -> Tensor | None:
        """Which places are real; None: all."""
        return None if self.whole else self.real_BN1[..., 0]

    @property
    def real_BN1(self) -> Tensor:
        places = torch.arange(self.symbols_BNS.shape[1], device=self.symbols_BNS.device)
        return (places < torch.tensor(self.lengths, device=places.device)[:, None])[..., None]


@dataclass
class Masked:
    """A mosaic as the model sees it, and which symbols it has to guess."""

    shown: Tensor
    asked: Tensor
    real_BN: Tensor | None = None
    """Which places are real; None: all."""


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

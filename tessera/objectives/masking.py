"""What is hidden of each example, and what else chance decides about it: all from the example's own
generator.

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
            raise ValueError(
                f"keep ({self.keep}) and replace ({self.replace}) are shares that together are at most 1."
            )

    def validate_data(self, levels: int) -> None:
        """Any number of them."""

    def expected_num_masked(self, layout: Layout) -> float:
        """How many symbols of an example are asked for, on average."""
        return layout.count * layout.slots * mean_share(self.schedule)

    def draw(self, tokens_NS: Tensor, vocab_size: int, generator: torch.Generator) -> Masked:
        """Always the same draws, so that what follows from the generator does not depend on the
        settings."""
        count = tokens_NS.numel()
        time = float(torch.rand((), generator=generator))
        order, fate = torch.rand(2, *tokens_NS.shape, generator=generator)
        others = torch.randint(vocab_size, tokens_NS.shape, generator=generator)
        hidden_count = max(1, round(hidden_share(self.schedule, time) * count))
        hidden = order.flatten().argsort().argsort().view(tokens_NS.shape) < hidden_count
        shown = tokens_NS.cpu().masked_fill(hidden, vocab_size)
        shown = torch.where(hidden & (fate < self.keep), tokens_NS.cpu(), shown)
        swapped = hidden & (fate >= self.keep) & (fate < self.keep + self.replace)
        return Masked(torch.where(swapped, others, shown), hidden)


@dataclass(frozen=True, kw_only=True)
class LevelMaskingConfig:
    """For symbols in several levels, of which a finer one only says what the coarser ones left over
    (SoundStorm, Borsos 2023, arXiv 2305.09636, section 3.2): of one level some are guessed, coarser
    ones are seen, finer ones are not."""

    schedule: Schedule = "cosine"
    """How many symbols of the level are hidden: the schedule at a random time, at least one."""
    prompt: bool = True
    """A beginning of random length is shown in all levels: the voice that the rest is to go on
    in."""

    def validate_data(self, levels: int) -> None:
        if levels < 2:
            raise ValueError(
                "This tokenizer writes one level, so masking by levels has none to choose from: give the run of a codec of "
                "several levels (--tokenizer RUN)."
            )

    def expected_num_masked(self, layout: Layout) -> float:
        """How many symbols of an example are asked for, on average: of one level, and after the
        prompt."""
        return layout.count * mean_share(self.schedule) * (0.5 if self.prompt else 1.0)

    def draw(self, tokens_NS: Tensor, vocab_size: int, generator: torch.Generator) -> Masked:
        """Always the same draws, so that what follows from the generator does not depend on the
        settings."""
        tokens_NS = tokens_NS.cpu()
        count, levels = tokens_NS.shape
        time, which, cut = torch.rand(3, generator=generator).tolist()
        order_N = torch.rand(count, generator=generator)
        level, begins = int(which * levels), int(cut * count) if self.prompt else 0
        after = count - begins
        hidden_count = max(1, round(hidden_share(self.schedule, time) * after))
        asked = torch.zeros_like(tokens_NS, dtype=torch.bool)
        asked[begins:, level] = order_N[begins:].argsort().argsort() < hidden_count
        finer = torch.zeros_like(asked)
        finer[begins:, level + 1 :] = True
        return Masked(tokens_NS.masked_fill(asked | finer, vocab_size), asked)


@dataclass
class TokenBatch:
    """The symbols of a batch of examples, of which each may be shorter than the longest; 0 where
    one has ended."""

    tokens_BNS: Tensor
    lengths: list[int]
    """How many places of each are real."""

    @classmethod
    def of(cls, tokens_BNS: Tensor) -> TokenBatch:
        """Of symbols that are -1 where an example has ended."""
        lengths_B = (tokens_BNS[..., 0] >= 0).sum(1)
        return cls(tokens_BNS.clamp_min(0), lengths_B.tolist())

    @property
    def whole(self) -> bool:
        return min(self.lengths) == self.tokens_BNS.shape[1]

    @property
    def real_BN(self) -> Tensor | None:
        """Which places are real; None: all."""
        return None if self.whole else self.real_BN1[..., 0]

    @property
    def real_BN1(self) -> Tensor:
        places = torch.arange(self.tokens_BNS.shape[1], device=self.tokens_BNS.device)
        return (places < torch.tensor(self.lengths, device=places.device)[:, None])[..., None]


@dataclass
class Masked:
    """A mosaic as the model sees it, and which symbols it has to guess."""

    shown: Tensor
    asked: Tensor
    real_BN: Tensor | None = None
    """Which places are real; None: all."""


@dataclass
class ExampleRandomness:
    """What is drawn for each example, from its own generator and always in the same order."""

    generators: list[torch.Generator]
    drop: list[float]
    remember: list[float]

    @classmethod
    def of(cls, batch: Batch) -> ExampleRandomness:
        generators = batch.generators()
        drop, remember = torch.stack(
            [torch.rand(2, generator=generator) for generator in generators]
        ).T.tolist()
        return cls(generators, drop, remember)

"""Laying a mosaic from nothing: all symbols are hidden, each round guesses them and keeps the best
(Chang 2022, 2202.04200).

`guess(tokens, asked, progress)` gives logits for the asked symbols, one row each, in the order of
`asked`'s places. What is drawn for an example comes from that example's own generator, so it does
not depend on who else is in the batch. Symbols that are given at the start (the rest of a picture
to be mended, a prompt) are never touched.

B batch, N places, S symbols in a place, M asked symbols, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tessera.sampling.logits import FilteredLogits, filter_top_k_p, sample_from_logits
from tessera.sampling.schedules import Schedule, hidden_after


def halton_order(cells_NSA: Tensor) -> Tensor:
    """The rank of each symbol in an order that spreads over the grid: (N, S), 0 first.

    Halton points, base 2, 3, 5 along the axes, fall into cells of the grid; a cell's rank is that
    of the first point in it. Symbols of one cell follow each other.
    """
    flat = cells_NSA.reshape(-1, cells_NSA.shape[-1])
    sides = (flat.max(0).values + 1).tolist()
    bases = (2, 3, 5)[: len(sides)]
    rank: dict[tuple[int, ...], int] = {}
    number = 0
    while len(rank) < math.prod(sides):
        number += 1
        cell = tuple(
            int(radical_inverse(number, base) * side)
            for base, side in zip(bases, sides, strict=True)
        )
        rank.setdefault(cell, len(rank))
    of_cell = torch.tensor([rank[tuple(cell)] for cell in flat.tolist()])
    return (
        (of_cell * len(flat) + torch.arange(len(flat)))
        .argsort()
        .argsort()
        .view(cells_NSA.shape[:-1])
    )


def radical_inverse(number: int, base: int) -> float:
    """The digits of a number, mirrored at the point."""
    value, weight = 0.0, 1.0
    while number:
        weight /= base
        number, digit = divmod(number, base)
        value += digit * weight
    return value


Guess = Callable[[Tensor, Tensor, float], Tensor]
Score = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, kw_only=True)
class MaskedSampling:
    decoding_steps: int = 12
    """How often the model is asked; more rounds make more careful pictures."""
    schedule: Schedule = "cosine"
    """How the number of hidden symbols falls from round to round."""
    order: Literal["confidence", "critic", "halton"] = "confidence"
    """Which symbols are kept first: those the model is surest of, those its critic believes, or an
    even spread."""
    temperature: float = 1.0
    """Of the draw of each symbol; 0 takes the likeliest."""
    choice_temperature: float = 4.5
    """Chance in the order by confidence, in the first round; it falls to none in the last (Besnier
    2023, 2310.14400)."""
    top_k: int = 0
    """Only the likeliest so many are drawn from; 0: all."""
    top_p: float = 1.0
    """Only the likeliest that together have this probability are drawn from."""
    decoding_steps_per_level: tuple[int, ...] = ()
    """Of symbols in several levels: each level is laid in so many rounds before the next is begun;
    the last number also holds for all further levels. A finer level of one round takes the
    likeliest. Empty: all levels together, in `decoding_steps`."""

    def __post_init__(self) -> None:
        if self.decoding_steps < 1:
            raise ValueError(
                f"A picture takes at least 1 round, but rounds is {self.decoding_steps}."
            )
        if (
            not 0 <= self.temperature < math.inf
            or not 0 <= self.choice_temperature < math.inf
            or self.top_k < 0
        ):
            raise ValueError(
                f"temperature ({self.temperature}), noise ({self.choice_temperature}) and top_k ({self.top_k}) are numbers from 0 on."
            )
        if any(decoding_steps < 1 for decoding_steps in self.decoding_steps_per_level):
            raise ValueError(
                f"A level takes at least 1 round, but level_rounds are {self.decoding_steps_per_level}."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability above 0 and up to 1, but it is {self.top_p}.")

    def stages(self, places: int, levels: int, device: torch.device) -> list[Stage] | None:
        """One for each level, the coarsest first; None: all symbols together."""
        if not self.decoding_steps_per_level:
            return None
        stages = []
        for level in range(levels):
            which = torch.zeros(places, levels, dtype=torch.bool, device=device)
            which[:, level] = True
            decoding_steps = self.decoding_steps_per_level[
                min(level, len(self.decoding_steps_per_level) - 1)
            ]
            stages.append(
                Stage(
                    which,
                    decoding_steps,
                    0.0 if level and decoding_steps == 1 else self.temperature,
                )
            )
        return stages


@dataclass
class Stage:
    """Some symbols that are laid together before others are begun: one level of a sound."""

    which: Tensor
    """(N, S), True for the symbols of this stage"""
    decoding_steps: int
    temperature: float


def maskgit_decode(
    tokens_BNS: Tensor,
    hidden_BNS: Tensor,
    guess: Guess,
    config: MaskedSampling,
    generators: Sequence[torch.Generator],
    *,
    mask: int,
    first_NS: Tensor | None = None,
    score: Score | None = None,
    stages: Sequence[Stage] | None = None,
) -> Tensor:
    """`tokens` with the hidden ones drawn. `first` ranks the symbols where the order is fixed
    (`halton`); `mask` stands for a hidden symbol; `score` is the critic's belief in each symbol."""
    if config.order == "critic" and score is None:
        raise ValueError(
            "This model has no critic to choose by: use the order `confidence` or `halton`."
        )
    if config.order == "halton" and first_NS is None:
        raise ValueError("The order `halton` needs the rank of each symbol: give `first_NS`.")
    layer = Layer(config, guess, generators, ends_of(hidden_BNS), mask, first_NS, score)
    tokens = tokens_BNS.masked_fill(hidden_BNS, mask)
    every = Stage(torch.ones_like(hidden_BNS[0]), config.decoding_steps, config.temperature)
    for stage in stages or [every]:
        tokens = layer.lay(tokens, hidden_BNS & stage.which, stage)
    return tokens


@dataclass
class Layer:
    """Lays one stage after the other."""

    config: MaskedSampling
    guess: Guess
    generators: Sequence[torch.Generator]
    ends: Sequence[int]
    """The place after the last that is to be laid, of each example."""
    mask: int
    first_NS: Tensor | None
    score: Score | None

    def lay(self, tokens: Tensor, to_lay: Tensor, stage: Stage) -> Tensor:
        totals = to_lay.flatten(1).sum(1).tolist()
        left, hidden = totals, to_lay
        for number in range(stage.decoding_steps):
            if not any(left):
                break
            progress = number / stage.decoding_steps
            places_M = hidden.flatten().nonzero()[:, 0]
            for_symbols, for_order = self.chance(tokens, left)
            logits_MV = self.guess(tokens, hidden, progress)
            greedy = stage.temperature == 0  # whatever is left out, the likeliest stays
            choice = (
                FilteredLogits(logits_MV, None)
                if greedy
                else filter_top_k_p(logits_MV, self.config.top_k, self.config.top_p)
            )
            chance_M = for_symbols.flatten().index_select(0, places_M)
            drawn_M = choice.tokens(
                sample_from_logits(choice.logits_MK, chance_M, stage.temperature)
            )
            tokens = tokens.flatten().index_copy(0, places_M, drawn_M).view_as(tokens)
            left = [
                min(
                    hidden_after(self.config.schedule, number, stage.decoding_steps, total),
                    max(0, before - 1),
                )
                for total, before in zip(totals, left, strict=True)
            ]
            if any(left):
                choice_temperature = Noise(
                    for_order,
                    self.config.choice_temperature * (1 - (number + 1) / stage.decoding_steps),
                )
                guessed = Guessed(hidden, places_M, logits_MV, drawn_M)
                hidden = lowest_k(
                    self.scores(tokens, to_lay, guessed, choice_temperature, progress), left
                )
                tokens = tokens.masked_fill(hidden, self.mask)
        return tokens

    def chance(self, tokens: Tensor, left: list[int]) -> Tensor:
        """Two uniform numbers for each symbol, from its example's generator; none for padding at
        its end, or a sound would be another one beside longer ones; and an example that is done
        draws no more."""
        batch, places, slots = tokens.shape
        chance = torch.zeros(2, batch, places, slots)
        for row, (generator, count, end) in enumerate(
            zip(self.generators, left, self.ends, strict=True)
        ):
            if count:
                chance[:, row, :end] = torch.rand(2, end, slots, generator=generator)
        return chance.to(tokens.device)

    def scores(
        self,
        tokens: Tensor,
        to_lay: Tensor,
        guessed: Guessed,
        choice_temperature: Noise,
        progress: float,
    ) -> Tensor:
        """(B, N, S): the least worthy are hidden again; what may not be is worth everything."""
        if self.config.order == "halton" and self.first_NS is not None:
            return (
                (-self.first_NS.to(tokens.device).float())
                .expand(tokens.shape)
                .masked_fill(~guessed.hidden, math.inf)
            )
        if self.config.order == "critic" and self.score is not None:
            believed = self.score(tokens, progress) + choice_temperature.everywhere()
            return believed.masked_fill(
                ~to_lay, math.inf
            )  # whatever was laid in this stage may be taken up again
        sure_M = (
            guessed.logits_MV.log_softmax(-1).gather(-1, guessed.drawn_M[:, None])[:, 0].float()
        )
        full = torch.full(tokens.shape, math.inf, device=tokens.device)
        worth_M = sure_M + choice_temperature.at(guessed.places_M)
        return full.flatten().index_copy(0, guessed.places_M, worth_M).view_as(full)


@dataclass
class Guessed:
    """What a round has made of the hidden symbols."""

    hidden: Tensor
    """(B, N, S)"""
    places_M: Tensor
    """Where they are, counted through the whole batch"""
    logits_MV: Tensor
    drawn_M: Tensor


@dataclass
class Noise:
    """Chance in the order in which symbols are kept."""

    chance: Tensor
    """(B, N, S), uniform"""
    strength: float

    def everywhere(self) -> Tensor:
        return self.strength * gumbel(self.chance)

    def at(self, places_M: Tensor) -> Tensor:
        return self.strength * gumbel(self.chance.flatten().index_select(0, places_M))


def ends_of(hidden_BNS: Tensor) -> list[int]:
    """Of each example the place after its last hidden one."""
    numbers_N = torch.arange(1, hidden_BNS.shape[1] + 1, device=hidden_BNS.device)
    return (hidden_BNS.any(2) * numbers_N).amax(1).tolist()


def gumbel(chance: Tensor) -> Tensor:
    return -torch.log(-torch.log(chance.clamp(1e-9, 1 - 1e-7)))


def lowest_k(worth_BNS: Tensor, counts: Sequence[int]) -> Tensor:
    """True for the so many least worthy of each example."""
    order = worth_BNS.flatten(1).argsort(dim=1, stable=True)
    among = (
        torch.arange(order.shape[1], device=order.device)
        < torch.tensor(counts, device=order.device)[:, None]
    )
    return torch.zeros_like(among).scatter(1, order, among).view(worth_BNS.shape)

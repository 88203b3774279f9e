"""Laying a mosaic from its beginning to its end, one symbol after the other.

`begin(prefix)` is told the places that all examples begin with and gives a function, `following(symbols)`: it is told the
symbols that were just laid, None at first, and gives logits for the next ones. What is drawn for an example comes from that
example's own generator, so it does not depend on who else is in the batch.

An example is a whole number of places of S symbols: its end may be drawn only where a place would begin.

B batch, N places, S symbols in a place, V vocabulary; V itself is the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.sampling.guidance import guided
from tessera.sampling.masked import drawn, likeliest

Following = Callable[[Tensor | None], Tensor]
"""(B,) -> (B, V + 1)"""
Begin = Callable[[Tensor], Following]
"""(B, N, S) -> what follows"""


@dataclass(frozen=True, kw_only=True)
class AutoregressiveSampling:
    temperature: float = 1.0
    """Of the draw of each symbol; 0 takes the likeliest."""
    top_k: int = 0
    """Only the likeliest so many are drawn from; 0: all."""
    top_p: float = 1.0
    """Only the likeliest that together have this probability are drawn from."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0:
            raise ValueError(f"temperature ({self.temperature}) and top_k ({self.top_k}) are numbers from 0 on.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability above 0 and up to 1, but it is {self.top_p}.")


@dataclass
class Written:
    symbols_BNS: Tensor
    """-1 after an example's last place"""
    ended_B: Tensor
    """Whether an example came to its end, and was not stopped at the most places"""


def write(
    begin: Begin,
    prompt_BNS: Tensor,
    config: AutoregressiveSampling,
    generators: Sequence[torch.Generator],
    *,
    end: int,
    most: int,
) -> Written:
    """Examples that begin with their prompts and have at most `most` places. -1 fills up shorter prompts; N may be 0."""
    batch, given, slots = prompt_BNS.shape
    if given > most:
        raise ValueError(f"A prompt of {given} places came where {most} are the most: shorten it, or allow more.")
    common = int((prompt_BNS >= 0).all(2).sum(1).min())
    writer = Writer(begin(prompt_BNS[:, :common]), config, generators, end, prompt_BNS.new_zeros(batch, dtype=torch.bool))
    places = list(prompt_BNS[:, :common].unbind(1))
    nothing_BS = prompt_BNS.new_full((batch, slots), -1)
    for number in range(common, most):
        place_BS = writer.place(prompt_BNS[:, number] if number < given else nothing_BS)
        if place_BS is None:
            break
        places.append(place_BS)
    return Written(torch.stack(places, dim=1) if places else prompt_BNS[:, :0], writer.ended_B)


@dataclass
class Writer:
    """Lays one place after the other, for all examples at once."""

    following: Following
    config: AutoregressiveSampling
    generators: Sequence[torch.Generator]
    end: int
    ended_B: Tensor
    previous_B: Tensor | None = None

    def place(self, known_BS: Tensor) -> Tensor | None:
        """The next place (B, S): known ones as they are, and -1 for examples that have ended; None if all have."""
        chance_BS = self.chance(known_BS)
        symbols = []
        for slot, known_B in enumerate(known_BS.unbind(1)):
            drawn_B = torch.where(known_B >= 0, known_B, self.draw(chance_BS[:, slot], may_end=slot == 0))
            self.ended_B = self.ended_B | (drawn_B == self.end)
            if slot == 0 and self.ended_B.all():
                return None
            self.previous_B = drawn_B.masked_fill(self.ended_B, 0)  # nobody will look at these, but a symbol it must be
            symbols.append(self.previous_B)
        return torch.stack(symbols, dim=1).masked_fill(self.ended_B[:, None], -1)

    def chance(self, known_BS: Tensor) -> Tensor:
        """A uniform number for each symbol, from its example's generator; who has ended or is told draws none."""
        idle = (self.ended_B | (known_BS[:, 0] >= 0)).tolist()
        slots = known_BS.shape[1]
        pairs = zip(self.generators, idle, strict=True)
        rows = [torch.zeros(slots) if still else torch.rand(slots, generator=generator) for generator, still in pairs]
        return torch.stack(rows).to(known_BS.device)

    def draw(self, chance_B: Tensor, *, may_end: bool) -> Tensor:
        logits_BV = self.following(self.previous_B)
        choice = likeliest(logits_BV if may_end else logits_BV[:, : self.end], self.config.top_k, self.config.top_p)
        return choice.symbols(drawn(choice.logits_MK, chance_B, self.config.temperature))


def led(begin: Begin, scale: float) -> Begin:
    """Under guidance. `begin` is asked for twice as many examples, of which it must take the second half to have no prompt."""

    def begin_both(prefix_BNS: Tensor) -> Following:
        following = begin(prefix_BNS.repeat(2, 1, 1))

        def guided_following(symbols_B: Tensor | None) -> Tensor:
            with_prompt, without = following(symbols_B.repeat(2) if symbols_B is not None else None).chunk(2)
            return guided(with_prompt, without, scale)

        return guided_following

    return begin_both

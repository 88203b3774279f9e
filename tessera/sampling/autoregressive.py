"""Laying a mosaic from its beginning to its end, one symbol after the other.

`begin(prefix)` is told the places that all examples begin with and gives a function,
`following(tokens)`: it is told the symbols that were just laid, None at first, and gives logits for
the next ones. What is drawn for an example comes from that example's own generator, so it does not
depend on who else is in the batch.

An example is a whole number of places of S symbols: its end may be drawn only where a place would
begin.

B batch, N places, S symbols in a place, V vocabulary; V itself is the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.sampling.guidance import guided
from tessera.sampling.logits import filter_top_k_p, sample_from_logits

NextLogits = Callable[[Tensor | None], Tensor]
"""(B,) -> (B, V + 1)"""
Begin = Callable[[Tensor], NextLogits]
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
            raise ValueError(
                f"temperature ({self.temperature}) and top_k ({self.top_k}) are numbers from 0 on."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is a probability above 0 and up to 1, but it is {self.top_p}.")


@dataclass
class Written:
    tokens_BNS: Tensor
    """-1 after an example's last place"""
    ended_B: Tensor
    """Whether an example came to its end, and was not stopped at the most places"""


@torch.inference_mode()
def write(
    begin: Begin,
    prompt_BNS: Tensor,
    config: AutoregressiveSampling,
    generators: Sequence[torch.Generator],
    *,
    end: int,
    most: int,
) -> Written:
    """Examples that begin with their prompts and have at most `most` places. -1 fills up shorter
    prompts; N may be 0."""
    batch, given, slots = prompt_BNS.shape
    if given > most:
        raise ValueError(
            f"A prompt of {given} places came where {most} are the most: shorten it, or allow more."
        )
    common = int((prompt_BNS >= 0).all(2).sum(1).min())
    ended_B = prompt_BNS.new_zeros(batch, dtype=torch.bool)
    writer = Writer(
        begin(prompt_BNS[:, :common]),
        config,
        chances(generators, (most, slots), prompt_BNS.device),
        end,
        ended_B,
    )
    places = list(prompt_BNS[:, :common].unbind(1))
    for number in range(common, most):
        place_BS = writer.place(number, prompt_BNS[:, number] if number < given else None)
        if place_BS is None:
            break
        places.append(place_BS)
    return Written(torch.stack(places, dim=1) if places else prompt_BNS[:, :0], writer.ended_B)


def chances(
    generators: Sequence[torch.Generator], shape: tuple[int, int], device: torch.device
) -> Tensor:
    """(N, S, B): a uniform number for each symbol there may be, from its example's generator."""
    return torch.stack(
        [torch.rand(shape, generator=generator) for generator in generators], dim=2
    ).to(device)


@dataclass
class Writer:
    """Lays one place after the other, for all examples at once."""

    following: NextLogits
    config: AutoregressiveSampling
    chance_NSB: Tensor
    end: int
    ended_B: Tensor
    previous_B: Tensor | None = None

    def place(self, number: int, known_BS: Tensor | None) -> Tensor | None:
        """The next place (B, S): known ones as they are, and -1 for examples that have ended; None
        if all have."""
        tokens = []
        for slot, chance_B in enumerate(self.chance_NSB[number].unbind(0)):
            drawn_B = self.draw(chance_B, may_end=slot == 0)
            if known_BS is not None:
                drawn_B = torch.where(known_BS[:, slot] >= 0, known_BS[:, slot], drawn_B)
            if slot == 0:
                self.ended_B = self.ended_B | (drawn_B == self.end)
                if self.ended_B.all():
                    return None
                drawn_B = drawn_B.masked_fill(
                    self.ended_B, 0
                )  # nobody will look at these, but a symbol it must be
            self.previous_B = drawn_B
            tokens.append(drawn_B)
        return torch.stack(tokens, dim=1).masked_fill(self.ended_B[:, None], -1)

    def draw(self, chance_B: Tensor, *, may_end: bool) -> Tensor:
        logits_BV = self.following(self.previous_B)
        choice = filter_top_k_p(
            logits_BV if may_end else logits_BV[:, : self.end], self.config.top_k, self.config.top_p
        )
        return choice.tokens(
            sample_from_logits(choice.logits_MK, chance_B, self.config.temperature)
        )


def with_cfg(begin: Begin, scale: float) -> Begin:
    """Under guidance. `begin` is asked for twice as many examples, of which it must take the second
    half to have no prompt."""

    def begin_both(prefix_BNS: Tensor) -> NextLogits:
        following = begin(prefix_BNS.repeat(2, 1, 1))

        def guided_following(symbols_B: Tensor | None) -> Tensor:
            with_prompt, without = following(
                symbols_B.repeat(2) if symbols_B is not None else None
            ).chunk(2)
            return guided(with_prompt, without, scale)

        return guided_following

    return begin_both

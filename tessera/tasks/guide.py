"""The guesses of a masked model under guidance."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tessera.models.masked_transformer import Condition, LastRound, MaskedTransformer
from tessera.nn.precision import wide
from tessera.sampling.guidance import Guidance, guided
from tessera.tasks.generator import Wanted


class Guide:
    """The model's guess under guidance: with the prompt and without in one pass, and without guidance half of that."""

    def __init__(
        self,
        network: MaskedTransformer,
        wanted: Wanted,
        guidance: Guidance,
        device: torch.device,
        real_BN: Tensor | None = None,
    ):
        self.network, self.real_BN = network, real_BN
        self.guidance = guidance if self.network.text is not None else dataclasses.replace(guidance, scale=1.0)
        self.count = len(wanted.texts)
        texts, dropped = list(wanted.texts), [False] * self.count
        coarser = wanted.coarser.to(device) if wanted.coarser is not None else None
        if self.guidance.scale != 1:
            texts += list(wanted.negative) if wanted.negative is not None else list(wanted.texts)
            dropped += [wanted.negative is None] * self.count
        self.both = self.network.condition(texts, dropped, coarser)
        self.alone = first_of(self.both, self.count)
        self.previous: Tensor | None = None
        self.last = LastRound()

    def __call__(self, symbols_BNS: Tensor, asked_BNS: Tensor, progress: float) -> Tensor:
        scale = self.guidance.at(progress)
        if scale == 1:
            return self.logits(symbols_BNS, asked_BNS, self.alone)
        doubled = self.logits(symbols_BNS, torch.cat([asked_BNS] * 2), self.both)
        with_prompt, without = doubled.chunk(2)
        return guided(with_prompt, without, scale)

    def logits(self, symbols: Tensor, asked: Tensor, condition: Condition) -> Tensor:
        if self.network.remembered is None:
            return wide(self.network.guess(symbols, asked, condition, self.real_BN, self.last))
        previous = self.previous
        if previous is not None and len(previous) != len(asked):
            previous = torch.cat([previous[: self.count]] * (len(asked) // self.count))
        self.previous = self.network.states(symbols, condition, previous, self.real_BN)
        return wide(self.network.logits(self.previous, asked))


def first_of(condition: Condition, count: int) -> Condition:
    looked = condition.looked
    return Condition([one.first(count) for one in looked] if looked is not None else None, condition.ground)

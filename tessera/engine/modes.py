"""Which networks move, which only look on, and where randomness has its address."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

_MASK = (1 << 64) - 1


def hash_seed(*parts: int) -> int:
    """Several whole numbers as one of 63 bits, so that neighbours have nothing to do with each
    other.

    splitmix64's finaliser (Steele 2014): seeding once per step must cost next to nothing.
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


@cache
def has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed(*parts: int) -> None:
    """All global randomness from here on is a function of these numbers."""
    number = hash_seed(*parts)
    # torch.manual_seed formats stack traces for accelerators it has not yet met, at every call:
    # 0.077 ms against 0.001.
    torch.default_generator.manual_seed(number)
    if has_accelerator():
        torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


class only:
    """`network` is trainable and in train mode; everything else in `task` is frozen and in eval
    mode; restored after.

    Who is inside is found once, and only what differs is changed: walking a task of a hundred
    modules takes longer than a small network takes to learn. May be entered again and again, but
    not within itself.
    """

    def __init__(self, task: nn.Module, network: nn.Module):
        parameters, modules = (
            {id(parameter) for parameter in network.parameters()},
            set(network.modules()),
        )
        self._learning = [
            parameter for parameter in task.parameters() if id(parameter) in parameters
        ]
        self._frozen = [
            parameter for parameter in task.parameters() if id(parameter) not in parameters
        ]
        self._training = [module for module in task.modules() if module in modules]
        self._resting = [module for module in task.modules() if module not in modules]
        self._restored: list[tuple[Any, str, bool]] = []

    def __enter__(self) -> None:
        self._make(self._learning, "requires_grad", True)
        self._make(self._frozen, "requires_grad", False)
        self._make(self._training, "training", True)
        self._make(self._resting, "training", False)

    def _make(self, things: list[Any], name: str, wanted: bool) -> None:
        states = list(map(attrgetter(name), things))
        if states.count(wanted) != len(states):
            for thing, state in zip(things, states, strict=True):
                if state != wanted:
                    self._restored.append((thing, name, state))
                    object.__setattr__(
                        thing, name, wanted
                    )  # nn.Module's own first looks for parameters

    def __exit__(self, *_: object) -> None:
        for thing, name, before in self._restored:
            object.__setattr__(thing, name, before)
        self._restored = []


@contextmanager
def eval_mode(task: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients, restored after."""
    modules = [(m, m.training) for m in task.modules()]
    try:
        task.train(False)
        with torch.no_grad():
            yield
    finally:
        for module, training in modules:
            module.training = training

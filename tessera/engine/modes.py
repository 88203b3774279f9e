"""Which networks move, which only look on, and where randomness has its address."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

_MASK = (1 << 64) - 1


def mixed(*parts: int) -> int:
    """Several whole numbers as one of 63 bits, so that neighbours have nothing to do with each other.

    splitmix64's finaliser (Steele 2014): seeding once per step must cost next to nothing.
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed(*parts: int) -> None:
    """All global randomness from here on is a function of these numbers."""
    number = mixed(*parts)
    torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


@contextmanager
def only(task: nn.Module, network: nn.Module) -> Iterator[None]:
    """`network` is trainable and in train mode; everything else in `task` is frozen and in eval mode; restored after."""
    parameters = [(p, p.requires_grad) for p in task.parameters()]
    modules = [(m, m.training) for m in task.modules()]
    try:
        task.train(False)
        for parameter, _ in parameters:
            parameter.requires_grad = False
        network.train(True)
        for parameter in network.parameters():
            parameter.requires_grad = True
        yield
    finally:
        for parameter, trainable in parameters:
            parameter.requires_grad = trainable
        for module, training in modules:
            module.training = training


@contextmanager
def evaluating(task: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients, restored after."""
    modules = [(m, m.training) for m in task.modules()]
    try:
        task.train(False)
        with torch.no_grad():
            yield
    finally:
        for module, training in modules:
            module.training = training

"""Train and eval modes of networks, and the seeds of all randomness."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_MASK = (1 << 64) - 1


def hash_seed(*parts: int) -> int:
    """Hash integers to one of 63 bits, so that neighbouring inputs give unrelated seeds.

    This is the finaliser of splitmix64 (Steele 2014): seeding once per step must cost almost
    nothing.
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
    """Seed the global generators of torch, NumPy and Python with a hash of these integers."""
    number = hash_seed(*parts)
    # torch.manual_seed formats stack traces for accelerators that are not initialised, at every
    # call: 0.077 ms instead of 0.001.
    torch.default_generator.manual_seed(number)
    if has_accelerator():
        torch.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


class train_only:
    """Context in which one network of a task is trainable and all others are frozen.

    `network` gets `requires_grad` and train mode; the rest of `task` gets neither. Parameters of
    `network` that do not require gradients when the context is constructed never do. Everything is
    restored on exit. Parameters and modules are collected once and only differences are written,
    because walking through a task of a hundred modules takes longer than a step of a small network.
    The context can be entered repeatedly, but not recursively.

    Modules in `also_train` are in train mode too, without their parameters.
    """

    def __init__(
        self, task: nn.Module, network: nn.Module, also_train: Sequence[nn.Module] = ()
    ) -> None:
        parameters = {id(one) for one in network.parameters() if one.requires_grad}
        modules = {*network.modules(), *also_train}
        trained = [p for p in task.parameters() if id(p) in parameters]
        frozen = [p for p in task.parameters() if id(p) not in parameters]
        train_mode = [m for m in task.modules() if m in modules]
        eval_mode = [m for m in task.modules() if m not in modules]
        self._settings: tuple[tuple[Sequence[object], str, bool], ...] = (
            (trained, "requires_grad", True),
            (frozen, "requires_grad", False),
            (train_mode, "training", True),
            (eval_mode, "training", False),
        )
        self._previous: list[tuple[object, str, bool]] = []

    def __enter__(self) -> None:
        for objects, attribute, value in self._settings:
            states = list(map(attrgetter(attribute), objects))
            if states.count(value) == len(states):
                continue
            for one, state in zip(objects, states, strict=True):
                if state != value:
                    self._previous.append((one, attribute, state))
                    # nn.Module.__setattr__ would search for parameters first.
                    object.__setattr__(one, attribute, value)

    def __exit__(self, *_: object) -> None:
        for one, attribute, state in self._previous:
            object.__setattr__(one, attribute, state)
        self._previous = []


@contextmanager
def eval_mode(task: nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients, and restore the modes on exit."""
    modules = [(module, module.training) for module in task.modules()]
    try:
        task.train(False)
        with torch.no_grad():
            yield
    finally:
        for module, training in modules:
            module.training = training


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a network, inner ones first: modules of a class with `is_block`.

    A network consists mostly of them, and calls nothing of them but `forward` in training, so that
    each can be sharded, and its activations computed again, on its own.
    """
    modules = reversed(list(network.modules()))
    return [module for module in modules if getattr(module, "is_block", False)]


def checkpoint_activations(network: nn.Module) -> None:
    """Compute the activations of a network's blocks again in the backward pass.

    Blocks draw no random numbers and change no state, so that calling them twice gives the same
    values.
    """
    for block in find_blocks(network):
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )

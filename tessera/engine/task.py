"""The contract between a task and the engine: what a task has to say, and nothing about how it is
carried out.

A *task* is the one network that will be published and what it has to lose. Each of its *updates* is
one optimizer's share of a step: which network moves, and which loss moves it. This file imports
only torch, so that a task can be written and tested without the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tessera.engine.optim.config import OptimizerConfig


@dataclass
class Batch:
    """Some examples that go through the networks together, and where each of them came from."""

    examples: Any
    """What the source's `collate` made of them: the tensors of one medium, with a `to(device)`."""
    names: list[str]
    """The name of each example in its source, for anybody who has to find it again."""
    seeds: list[int]
    """The address of each example's randomness: what a task draws for it, it draws from here."""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """Examples that could not be read and were replaced: name and reason."""
    scratch: dict[str, Tensor] = field(default_factory=dict)
    """What one update leaves, detached, for the next one of the same step (a reconstruction for its
    judge)."""

    def __len__(self) -> int:
        return len(self.names)

    def to(self, device: torch.device) -> Batch:
        return Batch(self.examples.to(device), self.names, self.seeds, self.rejected)

    def generators(self) -> list[torch.Generator]:
        """One generator per example, the same on any number of processes and in any batch."""
        return [torch.Generator().manual_seed(seed) for seed in self.seeds]


@dataclass
class Loss:
    terms: dict[str, Tensor]
    """Weighted; their sum is descended."""
    metrics: dict[str, Tensor | Callable[[], Tensor]] = field(default_factory=dict)
    """Watched, never descended. A function is asked only at steps that are logged, so it may cost
    something."""

    def total(self) -> Tensor:
        first, *others = (term.float() for term in self.terms.values())
        return reduce(add, others, first)


@dataclass(frozen=True, kw_only=True)
class Update:
    name: str
    trains: nn.Module
    """All of its parameters move, and no others."""
    loss: Callable[[Batch, int], Loss]
    optimizer: OptimizerConfig
    start_step: int = 0
    """The first step at which it moves."""
    prepare: Callable[[Sequence[Batch], int, ProcessGroup], None] | None = None
    """Sees all micro-batches of a step before their losses: for losses that are not a mean over
    examples."""


class Objective(nn.Module):
    """What is distributed: the loss, not the network.

    DDP wraps this, so a task may call any method of any network inside its loss: nobody unwraps, no
    key gets a prefix. Only `update.trains` is registered; the loss is a bound method of the task,
    which DDP does not look into.
    """

    def __init__(self, update: Update):
        super().__init__()
        self.trains = update.trains
        self._loss = update.loss

    def forward(self, batch: Batch, step: int) -> Loss:
        return self._loss(batch, step)


class Frozen(nn.Module):
    """A network that is held, not registered: a perceptual net, a text encoder, the tokenizer
    beneath a generator.

    It follows `.to(device)`, passes gradients to its input and stays in eval mode, and it is in no
    optimizer, no DDP bucket, no average and no checkpoint, because none of its parameters is ours
    to train.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self._held = (
            network.eval().requires_grad_(False),
        )  # a tuple, so that nn.Module does not register it

    @property
    def network(self) -> Any:
        return self._held[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)

    def train(self, mode: bool = True) -> Frozen:
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Frozen:
        self.network._apply(fn, recurse)
        return self


class Media(Protocol):
    """Something a person can open: a picture, a clip, a recording, a mesh."""

    def save(self, stem: Path) -> Path: ...
    @classmethod
    def sheet(cls, items: Sequence[Any]) -> Media: ...


@dataclass(frozen=True)
class Rows:
    """Observations that are laid one below the other instead of being added: for what only the
    whole held-out set can tell, such as ranks. They come in the order of the set, whatever the
    number of processes."""

    values: Tensor
    """(rows, ...): any number of them"""


class ProcessGroup(Protocol):
    """How the processes of a run come together. With one process everything is as it was."""

    rank: int
    world_size: int

    def sum(self, tensor: Tensor) -> Tensor: ...
    def rows(self, tensor: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class BestMetric:
    """The one number by which checkpoints are compared."""

    metric: str
    higher_is_better: bool = True


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A state of a run that a person should hear about, with what to do."""

    name: str
    metric: str
    """The name of the number watched, as it stands in metrics.jsonl."""
    below: float | None = None
    above: float | None = None
    patience: int = 3
    """How many records in a row must be out of bounds."""
    after: int = 0
    """Not before this step: much is allowed to a young run."""
    hint: str


class Task(nn.Module):
    """What a run is about. A subclass gives `model`, `updates`, and the last three methods
    below."""

    model: nn.Module
    updates: tuple[Update, ...]
    best_metric: BestMetric
    alarms: tuple[Alarm, ...] = ()

    def prepare_text(self, captions: Sequence[str], place: Path) -> None:
        """Before the first step: what is said about all training examples, and a folder for what is
        worth keeping of it."""

    def eval_step(self, batch: Batch) -> Mapping[str, Tensor | Rows]:
        """Observations of some held-out examples, to be added (sums, counts, moments; never means),
        or rows to be collected."""
        raise NotImplementedError

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """The numbers that the observations of the whole held-out set amount to: sums, and rows in
        the set's order."""
        raise NotImplementedError

    def sample(self, batch: Batch) -> list[Any]:
        """What the model makes of these examples: media that know how to save themselves, one or
        more for each."""
        raise NotImplementedError


def check_ownership(task: Task) -> None:
    """Every trainable parameter is owned by exactly one update, or the run does not start."""
    names = [update.name for update in task.updates]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"In a task two updates are called {twice[0]!r}: each needs a name of its own."
        )
    ours = {id(parameter) for parameter in task.parameters()}
    owners: dict[int, list[str]] = {}
    problems = []
    for update in task.updates:
        for name, parameter in update.trains.named_parameters():
            owners.setdefault(id(parameter), []).append(update.name)
            if id(parameter) not in ours:
                problems.append(
                    f"{name} of the network that {update.name!r} trains is no part of the task: nothing would save it"
                )
    for name, parameter in task.named_parameters():
        owned_by = owners.get(id(parameter), [])
        if not owned_by:
            problems.append(f"{name} belongs to no update, so it would never move")
        if len(owned_by) > 1:
            problems.append(f"{name} belongs to {' and '.join(owned_by)}, which would both move it")
    if problems:
        raise ValueError(
            "Every trainable parameter must belong to exactly one update of its task:\n  "
            + "\n  ".join(problems[:10])
            + (f"\n  and {len(problems) - 10} more" if len(problems) > 10 else "")
            + "\nGive it to an update's `trains`, or hold the network as Frozen(...)."
        )

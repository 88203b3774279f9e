"""Loaders: which example is at which position of a run, and batches from any step on.

Example number p of a run is a pure function of (seed, p), as `order` describes. Step s of batch
size B has the positions s*B to s*B + B - 1; its micro-batches are consecutive blocks of them, and
position i of a block is on process i modulo the number of processes. So the same examples are in
the same step for any number of processes and workers, and resuming at step 1,000,000 reads no
earlier example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tessera.data.dataset import ExampleDataset, read_item, spread_examples
from tessera.data.errors import UnreadableFile
from tessera.data.order import BalancedOrder, Order, ShuffledOrder
from tessera.data.workers import Monitor, WorkerPool
from tessera.engine.modes import hash_seed
from tessera.engine.task import Batch
from tessera.run.errors import UserError

MAX_REPLACEMENTS = 16
"""The number of consecutive unreadable examples after which loading fails."""

TRAIN, HELD_OUT = -1, -2
"""Parts of the seed of an example. They are negative, unlike ranks, so that no example shares its
random numbers with a step of any process."""


@dataclass
class LoadedExample:
    """An example with its name and seed."""

    example: object
    name: str
    seed: int
    rejected: list[tuple[str, str]]


class PositionedDataset(Protocol):
    """Examples by position, with their names and seeds."""

    dataset: ExampleDataset

    def load(self, position: int, monitor: Monitor) -> LoadedExample: ...


@dataclass
class ShuffledDataset:
    """A dataset in the order of a run: all examples in each epoch, or one of each group.

    Unreadable examples are replaced by random other ones.
    """

    dataset: ExampleDataset
    seed: int
    groups: Sequence[str] | None = None
    """The group of each example, if groups are drawn equally often."""

    def __post_init__(self) -> None:
        self.order: Order = (
            ShuffledOrder(len(self.dataset), self.seed)
            if self.groups is None
            else BalancedOrder(self.groups, self.seed)
        )

    def index(self, position: int) -> int:
        """Return the index of the example at a position."""
        return self.order.index(position)

    def load(self, position: int, monitor: Monitor) -> LoadedExample:
        seed = hash_seed(self.seed, TRAIN, position)
        rng = np.random.default_rng(seed)
        index = self.index(position)
        rejected: list[tuple[str, str]] = []
        for _ in range(MAX_REPLACEMENTS):
            try:
                monitor.begin(index)
                example = read_item(self.dataset, index, rng)
                return LoadedExample(example, self.dataset.name(index), seed, rejected)
            except UnreadableFile as error:
                rejected.append((self.dataset.name(index), str(error)))
                index = int(rng.integers(len(self.dataset)))
        reasons = "\n  ".join(f"{name}: {reason}" for name, reason in rejected[:3])
        raise UserError(
            f"{MAX_REPLACEMENTS} consecutive examples could not be read:\n  {reasons}\n"
            "`tessera check` shows which files can be used."
        )


@dataclass
class EvalDataset:
    """A dataset in its own order; the seed of an example is constant."""

    dataset: ExampleDataset
    seed: int

    def load(self, position: int, monitor: Monitor) -> LoadedExample:
        seed, name = hash_seed(self.seed, HELD_OUT, position), self.dataset.name(position)
        try:
            monitor.begin(position)
            example = read_item(self.dataset, position, np.random.default_rng(seed))
        except UnreadableFile as error:
            return LoadedExample(None, name, seed, [(name, str(error))])
        return LoadedExample(example, name, seed, [])


@dataclass
class LoadBatch:
    """Load the examples of some positions as a batch; a class, so that it can be sent to a worker.

    With `drop_unreadable`, examples that could not be read are missing from the batch.
    """

    examples: PositionedDataset
    drop_unreadable: bool = False

    def __call__(self, block: Sequence[int], monitor: Monitor) -> Batch:
        loaded = [self.examples.load(position, monitor) for position in block]
        monitor.end()
        rejected = [one for example in loaded for one in example.rejected]
        if self.drop_unreadable:
            loaded = [one for one in loaded if not one.rejected]
        collate = self.examples.dataset.collate
        examples = collate([one.example for one in loaded]) if loaded else None
        names, seeds = [one.name for one in loaded], [one.seed for one in loaded]
        return Batch(examples=examples, names=names, seeds=seeds, rejected=rejected)


def check_num_examples(dataset: ExampleDataset, batch_size: int) -> None:
    """Raise UserError if the training set is smaller than a batch."""
    if len(dataset) < batch_size:
        raise UserError(
            f"The batch size is {batch_size}, but the training set has {len(dataset)} examples. "
            f"Use --batch-size {len(dataset)} or less, or add data."
        )


def check_held_out(dataset: ExampleDataset, num_workers: int) -> None:
    """Raise UserError if no held-out example can be read; stop at the first one that can.

    With workers it is read in a worker, since a damaged file may end the process that reads it.
    """
    loader = EvalLoader(dataset, seed=0, batch_size=1, num_workers=min(1, num_workers))
    rejected: list[tuple[str, str]] = []
    for batch in loader.batches():
        if len(batch):
            return
        rejected += batch.rejected
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in rejected[:3])
    raise UserError(
        f"The {len(dataset)} held-out example(s) could not be read, and validation needs at least "
        f"one:{reasons}\n`tessera check` shows which files can be used: repair or remove the "
        "others, or hold out a larger fraction."
    )


@dataclass(kw_only=True)
class TrainLoader:
    """An endless stream of training examples, from any step on.

    With `contiguous`, the micro-batch of process r is block r of a micro-batch of all processes
    instead of every n-th example. Two processes then have the same blocks as one process with twice
    as many micro-batches, for models whose random draws depend on the block.
    """

    dataset: ExampleDataset = field(kw_only=False)
    seed: int
    batch_size: int
    grad_accum_steps: int = 1
    num_workers: int = 0
    contiguous: bool = False
    groups: Sequence[str] | None = None
    """The group of each example, if groups are drawn equally often."""

    def __len__(self) -> int:
        return len(self.dataset)

    def micro_batches(
        self, first_step: int, steps: int, rank: int, world_size: int
    ) -> Iterator[list[Batch]]:
        """Yield the micro-batches of this process for each step."""
        parts = self.grad_accum_steps * world_size
        if self.batch_size % parts:
            raise UserError(
                f"A batch of {self.batch_size} examples cannot be divided evenly into "
                f"{self.grad_accum_steps} micro-batch(es) on {world_size} process(es): use a "
                f"--batch-size that is a multiple of {parts}, such as "
                f"{-(-self.batch_size // parts) * parts}."
            )
        load = LoadBatch(ShuffledDataset(self.dataset, self.seed, self.groups))
        positions = self.positions(first_step, steps, rank, world_size)
        pending: list[Batch] = []
        for batch in WorkerPool(load, self.num_workers).results(positions):
            pending.append(batch)
            if len(pending) == self.grad_accum_steps:
                yield pending
                pending = []

    def positions(
        self, first_step: int, steps: int, rank: int, world_size: int
    ) -> Iterator[list[int]]:
        """Yield the positions of each micro-batch of a process."""
        block = self.batch_size // self.grad_accum_steps
        share = block // world_size
        for start in range(first_step * self.batch_size, steps * self.batch_size, block):
            if self.contiguous:
                start += rank * share
                yield list(range(start, start + share))
            else:
                yield list(range(start + rank, start + block, world_size))


@dataclass(kw_only=True)
class EvalLoader:
    """Batches of held-out examples that do not depend on the number of processes."""

    dataset: ExampleDataset = field(kw_only=False)
    seed: int
    batch_size: int
    num_workers: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def spread(self, count: int) -> list[int]:
        """Return the indices of examples spread over the dataset and its folders."""
        return spread_examples(self.dataset, count)

    def batches(
        self, rank: int = 0, world_size: int = 1, indices: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        """Yield this process's batches of the given examples, by default of all."""
        chosen = list(range(len(self.dataset)) if indices is None else indices)
        starts = range(rank * self.batch_size, len(chosen), world_size * self.batch_size)
        blocks = [chosen[start : start + self.batch_size] for start in starts]
        load = LoadBatch(EvalDataset(self.dataset, self.seed), drop_unreadable=True)
        return WorkerPool(load, self.num_workers).results(blocks)

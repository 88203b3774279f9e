"""Which example comes when: position -> epoch, index, generator; and loaders that can start
anywhere.

One clock (docs/design.md): example number `p` of a run is a pure function of `(seed, p)`. Step `s`
takes the positions `s*B .. s*B+B-1`, its micro-batches are consecutive blocks of them, and each
block is dealt to the processes like cards. So the same examples enter the same step on any number
of processes and workers, and resuming at step 1,000,000 reads no earlier example. Nothing here
knows a medium: a source has `len`, `name(index)`, `item(index, rng)` and `collate`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from tessera.data.errors import UnreadableFile
from tessera.engine.modes import hash_seed
from tessera.engine.task import Batch
from tessera.run.directory import UserError

TRIES = 16
"""How many other examples may stand in for an unreadable one before the source itself is
suspected."""

TRAINED, HELD_OUT = -1, -2
"""Parts of an example's address. No rank is negative, so no step of any process draws the same
numbers as an example."""


class ExampleDataset(Protocol):
    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def item(self, index: int, rng: np.random.Generator) -> Any: ...
    def collate(self, examples: list[Any]) -> Any: ...


@dataclass
class LoadedExample:
    """One example with its address."""

    example: Any
    name: str
    seed: int
    rejected: list[tuple[str, str]]


class EpochPermutation:
    """position -> epoch and index, by a permutation seeded with the epoch. Only the epoch in use is
    held."""

    def __init__(self, count: int, seed: int):
        self.count = count
        self.seed = seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def index(self, position: int) -> int:
        epoch, offset = divmod(position, self.count)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng(hash_seed(self.seed, epoch)).permutation(
                self.count
            )
            self._epoch = epoch
        return int(self._permutation[offset])


class ShuffledDataset(Dataset):
    """A source seen through the run's endless order. What cannot be read is replaced from the same
    position's generator."""

    def __init__(self, dataset: ExampleDataset, seed: int):
        self.dataset = dataset
        self.seed = seed
        self.order = EpochPermutation(len(dataset), seed)

    def __getitem__(self, position: int) -> LoadedExample:
        address = hash_seed(self.seed, TRAINED, position)
        rng = np.random.default_rng(address)
        index = self.order.index(position)
        rejected: list[tuple[str, str]] = []
        for _ in range(TRIES):
            try:
                return LoadedExample(
                    self.dataset.item(index, rng), self.dataset.name(index), address, rejected
                )
            except UnreadableFile as error:
                rejected.append((self.dataset.name(index), str(error)))
                index = int(rng.integers(len(self.dataset)))
        reasons = "\n  ".join(f"{name}: {reason}" for name, reason in rejected[:3])
        raise UserError(
            f"{TRIES} examples drawn one after the other could not be read, so the data as a whole is suspect:\n  {reasons}\n"
            "`tessera check` tells what can be used and what cannot."
        )


class MicroBatchSampler(Sampler[list[int]]):
    """The positions of one process's micro-batches, from a given step to the last."""

    def __init__(
        self,
        first_step: int,
        steps: int,
        batch_size: int,
        grad_accum_steps: int,
        rank: int,
        world_size: int,
    ):
        self.first_step, self.steps = first_step, steps
        self.batch_size, self.grad_accum_steps = batch_size, grad_accum_steps
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        block = self.batch_size // self.grad_accum_steps
        for start in range(self.first_step * self.batch_size, self.steps * self.batch_size, block):
            yield list(range(start + self.rank, start + block, self.world_size))

    def __len__(self) -> int:
        return max(0, self.steps - self.first_step) * self.grad_accum_steps


@dataclass
class Collate:
    """Drawn examples become a Batch; a class and not a closure, so that it can be sent to a
    worker."""

    dataset: ExampleDataset

    def __call__(self, drawn: list[LoadedExample]) -> Batch:
        return Batch(
            examples=self.dataset.collate([one.example for one in drawn]) if drawn else None,
            names=[one.name for one in drawn],
            seeds=[one.seed for one in drawn],
            rejected=[rejected for one in drawn for rejected in one.rejected],
        )


class TrainLoader:
    """The endless stream of a run's training examples, from any step on."""

    def __init__(
        self,
        dataset: ExampleDataset,
        *,
        seed: int,
        batch_size: int,
        grad_accum_steps: int = 1,
        num_workers: int = 0,
    ):
        if len(dataset) < batch_size:
            raise UserError(
                f"A batch takes {batch_size} examples, but the training set has {len(dataset)}. "
                f"Use --batch-size {len(dataset)} or less, or add data."
            )
        self.dataset = dataset
        self.seed = seed
        self.batch_size = batch_size
        self.grad_accum_steps = grad_accum_steps
        self.num_workers = num_workers

    def __len__(self) -> int:
        return len(self.dataset)

    def micro_batches(
        self, first_step: int, steps: int, rank: int, world_size: int
    ) -> Iterator[list[Batch]]:
        """For each step the micro-batches of this process."""
        share = self.grad_accum_steps * world_size
        if self.batch_size % share:
            raise UserError(
                f"A batch of {self.batch_size} examples cannot be dealt evenly to {world_size} process(es) in {self.grad_accum_steps} "
                f"micro-batch(es): use a --batch-size that {share} divides, such as {-(-self.batch_size // share) * share}."
            )
        blocks = MicroBatchSampler(
            first_step, steps, self.batch_size, self.grad_accum_steps, rank, world_size
        )
        loader = _loader(
            ShuffledDataset(self.dataset, self.seed),
            Collate(self.dataset),
            blocks,
            self.num_workers,
        )
        waiting: list[Batch] = []
        for batch in _plainly(loader):
            waiting.append(batch)
            if len(waiting) == self.grad_accum_steps:
                yield waiting
                waiting = []


class EvalDataset(Dataset):
    """A source in its own order, unreadable examples left out; the generator of an example never
    changes."""

    def __init__(self, dataset: ExampleDataset, seed: int):
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, index: int) -> LoadedExample | None:
        address = hash_seed(self.seed, HELD_OUT, index)
        try:
            example = self.dataset.item(index, np.random.default_rng(address))
        except UnreadableFile as error:
            return LoadedExample(
                None, self.dataset.name(index), address, [(self.dataset.name(index), str(error))]
            )
        return LoadedExample(example, self.dataset.name(index), address, [])


@dataclass
class CollateReadable:
    """As Collate, but an unreadable example is missing instead of replaced: each is measured once
    or not at all."""

    dataset: ExampleDataset

    def __call__(self, drawn: list[LoadedExample]) -> Batch:
        batch = Collate(self.dataset)([one for one in drawn if not one.rejected])
        batch.rejected = [rejected for one in drawn for rejected in one.rejected]
        return batch


class EvalLoader:
    """The whole held-out set, once, in batches that are the same whatever the number of
    processes."""

    def __init__(
        self, dataset: ExampleDataset, *, seed: int, batch_size: int, num_workers: int = 0
    ):
        self.dataset = dataset
        self.seed = seed
        self.batch_size = batch_size
        self.num_workers = num_workers

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, rank: int, world_size: int, limit: int | None = None) -> Iterator[Batch]:
        """This process's batches of the first `limit` examples."""
        count = len(self.dataset) if limit is None else min(limit, len(self.dataset))
        starts = range(rank * self.batch_size, count, world_size * self.batch_size)
        blocks = [list(range(start, min(start + self.batch_size, count))) for start in starts]
        return iter(
            _loader(
                EvalDataset(self.dataset, self.seed),
                CollateReadable(self.dataset),
                blocks,
                self.num_workers,
            )
        )


def _loader(
    dataset: Dataset,
    collate: Any,
    blocks: Sampler[list[int]] | Sequence[list[int]],
    num_workers: int,
) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=blocks,  # type: ignore[arg-type]
        collate_fn=collate,
        num_workers=num_workers,
        worker_init_fn=_deaf_to_signals if num_workers else None,
        prefetch_factor=4 if num_workers else None,
    )


def _plainly(loader: DataLoader) -> Iterator[Batch]:
    """A refusal raised in a worker arrives wrapped in the worker's traceback; the person gets the
    letter only.

    The frames of that traceback hold the loader's iterator in a circle, and an iterator that is
    collected as garbage waits in vain for its workers. So the circle is broken here, and they are
    gone before the letter is read.
    """
    try:
        yield from loader
        return
    except UserError as refused:
        letter = str(refused).rsplit("Refused: ", 1)[-1].strip()
        traceback.clear_frames(refused.__traceback__)
    raise UserError(letter)


def _deaf_to_signals(worker: int) -> None:
    """Ctrl-C reaches the whole process group; the run decides when it stops, its workers follow."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """multiprocessing ends its children with SIGTERM and waits for them; those who are deaf to it
    would never go.

    It happens where an accident leaves a loader half read: the trace holds it until the very end.
    """
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # torch's handler would take their end for an accident
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()

"""Tests of the loaders: which example is in which step, on any number of processes and workers."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.data.dataset import ExampleDataset
from tessera.data.errors import UnreadableFile
from tessera.data.loader import (
    MAX_REPLACEMENTS,
    EvalDataset,
    EvalLoader,
    LoadBatch,
    ShuffledDataset,
    TrainLoader,
    check_held_out,
    check_num_examples,
)
from tessera.data.workers import Monitor
from tessera.engine.modes import hash_seed
from tessera.engine.task import Batch
from tessera.run.errors import UserError


class Numbers(ExampleDataset):
    """Example i is [i, two random numbers of its generator]; some examples may be unreadable.

    `read` lists the indices in the order in which they are read.
    """

    def __init__(self, count: int, unreadable: set[int] | None = None):
        self.count = count
        self.unreadable = unreadable or set()
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"{index}.png"

    def item(self, index: int, rng: np.random.Generator) -> np.ndarray:
        self.read.append(index)
        if index in self.unreadable:
            raise UnreadableFile(f"{index}.png: truncated")
        return np.array([index, *rng.random(2)])

    def collate(self, examples: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(examples))


def train_loader(dataset: Numbers, **settings: int) -> TrainLoader:
    return TrainLoader(dataset, **({"seed": 3, "batch_size": 8} | settings))


def load_steps(
    loader: TrainLoader, first: int, last: int, rank: int = 0, world_size: int = 1
) -> list[list[Batch[Any]]]:
    return list(loader.micro_batches(first, last, rank, world_size))


# ---- order


def test_order_is_a_pure_function_of_seed_and_position():
    forwards, backwards, other = (ShuffledDataset(Numbers(10), seed=4) for _ in range(3))
    positions = range(45)
    expected = {position: forwards.index(position) for position in positions}
    assert {position: backwards.index(position) for position in reversed(positions)} == expected
    assert other.index(44) == expected[44]


def test_each_epoch_is_a_new_permutation_of_all_examples():
    order = ShuffledDataset(Numbers(10), seed=4)
    epochs = [[order.index(epoch * 10 + offset) for offset in range(10)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_different_seeds_give_different_orders():
    orders = {
        tuple(ShuffledDataset(Numbers(50), seed).index(position) for position in range(50))
        for seed in range(20)
    }
    assert len(orders) == 20


# ---- the same examples in the same step


@pytest.fixture(scope="module")
def single_process() -> list[Batch[Any]]:
    """Return five steps of 8 of 19 examples without workers: more than two epochs."""
    return [
        micro_batches[0]
        for micro_batches in load_steps(train_loader(Numbers(19, unreadable={5})), 0, 5)
    ]


def load_on_ranks(
    world_size: int, num_workers: int, **settings: int
) -> list[list[list[Batch[Any]]]]:
    """Return the batches indexed by step, micro-batch and rank."""
    ranks = []
    for rank in range(world_size):
        loader = train_loader(Numbers(19, unreadable={5}), num_workers=num_workers, **settings)
        ranks.append(load_steps(loader, 0, 5, rank, world_size))
    return [
        [[ranks[r][step][micro] for r in range(world_size)] for micro in range(len(ranks[0][step]))]
        for step in range(5)
    ]


def merge(batches: list[Batch[Any]]) -> tuple[list[str], list[int], Tensor]:
    """Return names, seeds and examples of the global batch of which each rank has a part."""
    order = [(rank, row) for row in range(len(batches[0])) for rank in range(len(batches))]
    return (
        [batches[rank].names[row] for rank, row in order],
        [batches[rank].seeds[row] for rank, row in order],
        torch.stack([batches[rank].examples[row] for rank, row in order]),
    )


@pytest.mark.parametrize(("world_size", "num_workers"), list(itertools.product([1, 2, 4], [0, 2])))
def test_steps_have_the_same_examples_for_any_number_of_processes(
    world_size, num_workers, single_process
):
    for step, (batches,) in enumerate(load_on_ranks(world_size, num_workers)):
        names, seeds, examples = merge(batches)
        assert names == single_process[step].names and seeds == single_process[step].seeds
        assert torch.equal(examples, single_process[step].examples), "including augmentation"


@pytest.mark.parametrize(
    ("grad_accum_steps", "world_size"), [(2, 1), (4, 1), (8, 1), (2, 2), (2, 4)]
)
def test_micro_batches_are_consecutive_blocks_of_the_batch(
    grad_accum_steps, world_size, single_process
):
    steps = load_on_ranks(world_size, num_workers=0, grad_accum_steps=grad_accum_steps)
    for step, micro_batches in enumerate(steps):
        assert len(micro_batches) == grad_accum_steps
        blocks = [merge(batches) for batches in micro_batches]
        names = [name for block_names, _, _ in blocks for name in block_names]
        assert names == single_process[step].names
        examples = torch.cat([block_examples for _, _, block_examples in blocks])
        assert torch.equal(examples, single_process[step].examples)


def test_each_visit_of_an_example_is_augmented_differently():
    drawn: dict[str, set[float]] = {}
    for (batch,) in load_steps(train_loader(Numbers(8)), 0, 4):
        for name, example in zip(batch.names, batch.examples):
            drawn.setdefault(name, set()).add(example[1].item())
    assert all(len(values) == 4 for values in drawn.values())


def test_loading_does_not_change_the_global_generators():
    steps = iter(train_loader(Numbers(19)).micro_batches(0, 5, 0, 1))
    next(steps)
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    next(steps)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_seeds_of_examples_differ_from_seeds_of_steps():
    """Otherwise dropout of a process would use the random numbers of an augmentation."""
    (batch,) = next(train_loader(Numbers(64), batch_size=64).micro_batches(0, 1, 0, 1))
    (held_out,) = EvalLoader(Numbers(64), seed=3, batch_size=64).batches(0, 1)
    seeds = set(batch.seeds) | set(held_out.seeds)
    assert len(seeds) == 128
    assert not seeds & {hash_seed(3, rank, step) for rank in range(16) for step in range(64)}


# ---- resume


def test_resumed_run_loads_the_same_examples():
    straight = load_steps(train_loader(Numbers(19), grad_accum_steps=2), 0, 9)
    resumed = load_steps(train_loader(Numbers(19), grad_accum_steps=2), 6, 9)
    assert [[batch.names for batch in step] for step in resumed] == [
        [batch.names for batch in step] for step in straight[6:]
    ]
    assert all(
        torch.equal(one.examples, other.examples)
        for resumed_step, step in zip(resumed, straight[6:])
        for one, other in zip(resumed_step, step)
    )


def test_resuming_at_step_one_million_reads_no_earlier_example():
    dataset = Numbers(1000)
    steps = train_loader(dataset).micro_batches(1_000_000, 1_000_003, 0, 1)
    assert len(list(steps)) == 3
    order = ShuffledDataset(dataset, 3)
    assert dataset.read == [order.index(position) for position in range(8_000_000, 8_000_024)]


def test_completed_run_loads_nothing():
    dataset = Numbers(19)
    assert load_steps(train_loader(dataset), 5, 5) == []
    assert load_steps(train_loader(dataset), 9, 5) == []
    assert dataset.read == []


# ---- unreadable examples


def test_unreadable_examples_are_replaced_and_reported():
    dataset = Numbers(16, unreadable={2, 9})
    rejected: Counter[tuple[str, str]] = Counter()
    for (batch,) in load_steps(train_loader(dataset), 0, 6):
        assert len(batch) == 8 and not {"2.png", "9.png"} & set(batch.names)
        loaded = [f"{int(example[0])}.png" for example in batch.examples]
        assert loaded == batch.names, "the name is that of the replacement"
        rejected.update(batch.rejected)
    assert rejected.keys() == {("2.png", "2.png: truncated"), ("9.png", "9.png: truncated")}


def test_replacement_depends_on_the_position_only():
    first, second = (
        ShuffledDataset(Numbers(16, unreadable=set(range(8))), seed=3) for _ in range(2)
    )
    names = [first.load(position, Monitor()).name for position in range(40)]
    again = [second.load(position, Monitor()).name for position in reversed(range(40))]
    assert again == names[::-1]
    assert set(names) == {f"{index}.png" for index in range(8, 16)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_without_traceback_if_nothing_can_be_read(num_workers):
    loader = train_loader(Numbers(16, unreadable=set(range(16))), num_workers=num_workers)
    with pytest.raises(UserError) as raised:
        next(loader.micro_batches(0, 5, 0, 1))
    message = str(raised.value)
    assert message.startswith(f"{MAX_REPLACEMENTS} consecutive examples could not be read")
    assert "truncated" in message
    assert message.endswith("`tessera check` shows which files can be used.")
    assert "Traceback" not in message and "worker" not in message
    assert raised.value.__cause__ is None and raised.value.__context__ is None
    assert not multiprocessing.active_children(), "the workers have ended"


CRASH = """
from tests.data.test_loader import Numbers, train_loader
steps = train_loader(Numbers(64), num_workers=2).micro_batches(0, 1000, 0, 1)
next(steps)
raise MemoryError("out of memory")
"""


def test_crash_ends_the_process_although_workers_ignore_signals():
    """Otherwise a run that crashed would hang and keep its directory locked."""
    root = Path(__file__).resolve().parents[2]
    process = subprocess.run(
        [sys.executable, "-c", CRASH], cwd=root, capture_output=True, text=True, timeout=1200
    )
    assert process.returncode == 1
    assert process.stderr.rstrip().endswith("MemoryError: out of memory"), "and no other error"


@pytest.mark.parametrize("drop_unreadable", [False, True])
def test_batches_drop_unreadable_examples_only_if_requested(drop_unreadable):
    dataset = EvalDataset(Numbers(3, unreadable={1}), seed=3)
    block = [0, 1, 2] if drop_unreadable else [0, 2]
    batch = LoadBatch(dataset, drop_unreadable)(block, Monitor())
    assert batch.names == ["0.png", "2.png"] and batch.examples[:, 0].tolist() == [0, 2]
    assert batch.seeds == [dataset.load(position, Monitor()).seed for position in (0, 2)]
    assert batch.rejected == ([("1.png", "1.png: truncated")] if drop_unreadable else [])


# ---- invalid settings


def test_dataset_smaller_than_a_batch_is_rejected_with_both_numbers():
    message = "The batch size is 8, but the training set has 5 examples. Use --batch-size 5 or less"
    with pytest.raises(UserError, match=message):
        check_num_examples(Numbers(5), batch_size=8)
    assert len(load_steps(train_loader(Numbers(8)), 0, 3)) == 3, "a single batch is enough"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_held_out_set_needs_one_readable_example(num_workers):
    check_held_out(Numbers(5, unreadable={0, 1, 2, 3}), num_workers)
    message = r"The 5 held-out example\(s\) could not be read.*\n  0.png: 0.png: truncated\n  1.png"
    with pytest.raises(UserError, match=message):
        check_held_out(Numbers(5, unreadable=set(range(5))), num_workers)


def test_held_out_set_is_read_up_to_its_first_readable_example():
    dataset = Numbers(5, unreadable={0})
    check_held_out(dataset, num_workers=0)
    assert dataset.read == [0, 1]


@pytest.mark.parametrize(
    ("grad_accum_steps", "world_size", "valid"), [(1, 3, 9), (2, 3, 12), (4, 4, 16), (1, 16, 16)]
)
def test_indivisible_batch_is_rejected_with_a_size_that_works(grad_accum_steps, world_size, valid):
    loader = train_loader(Numbers(64), grad_accum_steps=grad_accum_steps)
    message = f"{grad_accum_steps} micro-batch.* {world_size} process.*such as {valid}"
    with pytest.raises(UserError, match=message):
        next(loader.micro_batches(0, 1, 0, world_size))
    divisible = train_loader(Numbers(64), grad_accum_steps=grad_accum_steps, batch_size=valid)
    assert next(divisible.micro_batches(0, 1, 0, world_size))


# ---- evaluation


def load_held_out(
    dataset: Numbers,
    world_size: int,
    num_workers: int = 0,
    indices: Sequence[int] | None = None,
) -> Iterator[Batch[Any]]:
    for rank in range(world_size):
        loader = EvalLoader(dataset, seed=3, batch_size=4, num_workers=num_workers)
        yield from loader.batches(rank, world_size, indices)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 4, 19])
def test_every_held_out_example_is_loaded_exactly_once(count, world_size):
    batches = load_held_out(Numbers(count), world_size)
    names = Counter(name for batch in batches for name in batch.names)
    assert names == Counter(f"{index}.png" for index in range(count))


@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 0), (4, 0), (1, 2)])
def test_evaluation_batches_do_not_depend_on_the_number_of_processes(world_size, num_workers):
    """A network may round a batch of four differently than one of three."""
    single = {tuple(batch.names): batch.examples for batch in load_held_out(Numbers(19), 1)}
    shared = {
        tuple(batch.names): batch.examples
        for batch in load_held_out(Numbers(19), world_size, num_workers)
    }
    assert single.keys() == shared.keys()
    assert all(torch.equal(single[names], shared[names]) for names in single)


def test_held_out_examples_are_the_same_at_every_evaluation():
    first, second = (list(load_held_out(Numbers(6), 1)) for _ in range(2))
    assert all(torch.equal(one.examples, other.examples) for one, other in zip(first, second))


def test_unreadable_held_out_examples_are_left_out_and_reported():
    batches = list(load_held_out(Numbers(9, unreadable={0, 1, 2, 3, 6}), 1))
    assert [batch.names for batch in batches] == [[], ["4.png", "5.png", "7.png"], ["8.png"]]
    assert batches[0].examples is None and len(batches[0]) == 0
    rejected = [name for batch in batches for name, _ in batch.rejected]
    assert rejected == ["0.png", "1.png", "2.png", "3.png", "6.png"]


@pytest.mark.parametrize("indices", [range(6), (18, 2, 7)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_can_be_limited_to_some_examples(world_size, indices):
    batches = list(load_held_out(Numbers(19), world_size, indices=indices))
    names = sorted(name for batch in batches for name in batch.names)
    assert names == sorted(f"{index}.png" for index in indices)
    all_seeds = {
        name: seed
        for batch in load_held_out(Numbers(19), 1)
        for name, seed in zip(batch.names, batch.seeds)
    }
    seeds = {name: seed for batch in batches for name, seed in zip(batch.names, batch.seeds)}
    assert all(seed == all_seeds[name] for name, seed in seeds.items())

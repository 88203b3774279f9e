"""One clock: which example comes when, on any number of processes and workers, from any step on."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.data.errors import UnreadableFile
from tessera.data.loader import MAX_REPLACEMENTS, EpochPermutation, EvalLoader, ShuffledDataset, TrainLoader
from tessera.engine.modes import hash_seed
from tessera.engine.task import Batch
from tessera.run.errors import UserError


class Numbers:
    """Example i is [i, two draws of its own generator]; some may be broken, and all that are read
    are counted."""

    def __init__(self, count: int, broken: set[int] | None = None):
        self.count = count
        self.broken = broken or set()
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"{index}.png"

    def item(self, index: int, rng: np.random.Generator) -> np.ndarray:
        self.read.append(index)
        if index in self.broken:
            raise UnreadableFile(f"{index}.png: cut short")
        return np.array([index, *rng.random(2)])

    def collate(self, examples: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(examples))


def training(dataset: Numbers, **settings: int) -> TrainLoader:
    return TrainLoader(dataset, **({"seed": 3, "batch_size": 8} | settings))


def steps_of(
    stream: TrainLoader, first: int, last: int, rank: int = 0, world_size: int = 1
) -> list[list[Batch]]:
    return list(stream.micro_batches(first, last, rank, world_size))


# ------------------------------------------------------------------------------------------------------------- order


def test_the_order_is_a_pure_function_of_seed_and_position():
    forwards, backwards = EpochPermutation(10, seed=4), EpochPermutation(10, seed=4)
    positions = range(45)
    ahead = {position: forwards.index(position) for position in positions}
    assert {position: backwards.index(position) for position in reversed(positions)} == ahead
    assert EpochPermutation(10, seed=4).index(44) == ahead[44]


def test_each_epoch_is_a_new_order_of_all_examples():
    order = EpochPermutation(10, seed=4)
    epochs = [[order.index(epoch * 10 + offset) for offset in range(10)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_another_seed_is_another_order():
    firsts = {
        tuple(EpochPermutation(50, seed).index(position) for position in range(50))
        for seed in range(20)
    }
    assert len(firsts) == 20


# ------------------------------------------------------------------------------------- the same examples in the same step


@pytest.fixture(scope="module")
def alone() -> list[Batch]:
    """Five steps of eight examples of a set of 19, on one process without workers: more than two
    epochs."""
    return [micros[0] for micros in steps_of(training(Numbers(19, broken={5})), 0, 5)]


def dealt(world_size: int, num_workers: int, **settings: int) -> list[list[list[Batch]]]:
    """[step][micro-batch][rank]"""
    ranks = []
    for rank in range(world_size):
        stream = training(Numbers(19, broken={5}), num_workers=num_workers, **settings)
        ranks.append(steps_of(stream, 0, 5, rank, world_size))
    return [
        [[ranks[r][step][micro] for r in range(world_size)] for micro in range(len(ranks[0][step]))]
        for step in range(5)
    ]


def joined(hands: list[Batch]) -> tuple[list[str], list[int], Tensor]:
    """The global batch whose cards these hands were dealt."""
    order = [(hand, card) for card in range(len(hands[0])) for hand in range(len(hands))]
    return (
        [hands[hand].names[card] for hand, card in order],
        [hands[hand].seeds[card] for hand, card in order],
        torch.stack([hands[hand].examples[card] for hand, card in order]),
    )


@pytest.mark.parametrize(("processes", "workers"), list(itertools.product([1, 2, 4], [0, 2])))
def test_the_same_examples_enter_the_same_step_on_any_number_of_processes_and_workers(
    world_size, num_workers, alone
):
    for step, (hands,) in enumerate(dealt(world_size, num_workers)):
        names, seeds, examples = joined(hands)
        assert names == alone[step].names and seeds == alone[step].seeds
        assert torch.equal(examples, alone[step].examples), "their augmentation too"


@pytest.mark.parametrize(("accumulate", "processes"), [(2, 1), (4, 1), (8, 1), (2, 2), (2, 4)])
def test_micro_batches_are_consecutive_blocks_of_the_batch(grad_accum_steps, world_size, alone):
    for step, micros in enumerate(
        dealt(world_size, num_workers=0, grad_accum_steps=grad_accum_steps)
    ):
        assert len(micros) == grad_accum_steps
        blocks = [joined(hands) for hands in micros]
        assert [name for names, _, _ in blocks for name in names] == alone[step].names
        assert torch.equal(torch.cat([examples for _, _, examples in blocks]), alone[step].examples)


def test_an_example_that_comes_again_is_augmented_anew():
    seen: dict[str, set[float]] = {}
    for (batch,) in steps_of(training(Numbers(8)), 0, 4):
        for name, example in zip(batch.names, batch.examples):
            seen.setdefault(name, set()).add(example[1].item())
    assert all(len(draws) == 4 for draws in seen.values())


def test_drawing_examples_leaves_the_global_generators_alone():
    stream = iter(training(Numbers(19)).micro_batches(0, 5, 0, 1))
    next(stream)
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    next(stream)
    assert (
        torch.equal(torch.get_rng_state(), before[0])
        and np.random.get_state()[1].tolist() == before[1]
    )


def test_no_step_of_any_process_has_the_address_of_an_example():
    """Otherwise the dropout of that process would be the augmentation of that example."""
    (batch,) = next(training(Numbers(64), batch_size=64).micro_batches(0, 1, 0, 1))
    (held_out,) = EvalLoader(Numbers(64), seed=3, batch_size=64).batches(0, 1)
    examples = set(batch.seeds) | set(held_out.seeds)
    assert len(examples) == 128
    assert not examples & {hash_seed(3, rank, step) for rank in range(16) for step in range(64)}


# ------------------------------------------------------------------------------------------------------------ resume


def test_a_resumed_run_draws_what_it_would_have_drawn():
    straight = steps_of(training(Numbers(19), grad_accum_steps=2), 0, 9)
    resumed = steps_of(training(Numbers(19), grad_accum_steps=2), 6, 9)
    assert [[b.names for b in micros] for micros in resumed] == [
        [b.names for b in micros] for micros in straight[6:]
    ]
    assert all(
        torch.equal(a.examples, b.examples)
        for x, y in zip(resumed, straight[6:])
        for a, b in zip(x, y)
    )


def test_resuming_at_step_a_million_reads_no_earlier_example():
    dataset = Numbers(1000)
    stream = training(dataset).micro_batches(1_000_000, 1_000_003, 0, 1)
    assert len(list(stream)) == 3
    expected = [
        EpochPermutation(1000, 3).index(position) for position in range(8_000_000, 8_000_024)
    ]
    assert dataset.read == expected


def test_a_finished_run_draws_nothing():
    dataset = Numbers(19)
    assert steps_of(training(dataset), 5, 5) == [] and steps_of(training(dataset), 9, 5) == []
    assert dataset.read == []


# -------------------------------------------------------------------------------------------------------- unreadable


def test_what_cannot_be_read_is_replaced_and_told_and_the_batch_stays_whole():
    dataset = Numbers(16, broken={2, 9})
    told: Counter[tuple[str, str]] = Counter()
    for (batch,) in steps_of(training(dataset), 0, 6):
        assert len(batch) == 8 and not {"2.png", "9.png"} & set(batch.names)
        assert [f"{int(example[0])}.png" for example in batch.examples] == batch.names, (
            "the name is that of the stand-in"
        )
        told.update(batch.rejected)
    assert told.keys() == {("2.png", "2.png: cut short"), ("9.png", "9.png: cut short")}


def test_the_stand_in_is_a_function_of_the_position_alone():
    first, second = (ShuffledDataset(Numbers(16, broken=set(range(8))), seed=3) for _ in range(2))
    there = [first[position].name for position in range(40)]
    assert [second[position].name for position in reversed(range(40))] == there[::-1]
    assert set(there) == {f"{index}.png" for index in range(8, 16)}


@pytest.mark.parametrize("workers", [0, 2])
def test_where_nothing_can_be_read_the_person_gets_a_letter_and_no_trace(num_workers):
    stream = training(Numbers(16, broken=set(range(16))), num_workers=num_workers)
    with pytest.raises(UserError) as run_invalid:
        next(stream.micro_batches(0, 5, 0, 1))
    letter = str(run_invalid.value)
    assert letter.startswith(f"{MAX_REPLACEMENTS} examples drawn one after the other could not be read")
    assert "cut short" in letter and letter.endswith(
        "`tessera check` tells what can be used and what cannot."
    )
    assert "Traceback" not in letter and "worker" not in letter
    assert run_invalid.value.__cause__ is None and run_invalid.value.__context__ is None
    assert not multiprocessing.active_children(), (
        "the workers are gone, and nobody waits for them at the end"
    )


CRASH = """
from tests.data.test_loader import Numbers, training
stream = training(Numbers(64), workers=2).micro_batches(0, 1000, 0, 1)
next(stream)
raise MemoryError("an accident")
"""


def test_an_accident_ends_the_process_although_its_workers_are_deaf_to_signals():
    """Otherwise a run that crashed would hang for ever, and hold its folder."""
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", CRASH], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("MemoryError: an accident"), (
        "and nothing else is complained about"
    )


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_set_smaller_than_a_batch_is_refused_with_both_numbers():
    with pytest.raises(
        UserError,
        match="A batch takes 8 examples, but the training set has 5. Use --batch-size 5 or less",
    ):
        training(Numbers(5))
    assert len(steps_of(training(Numbers(8)), 0, 3)) == 3, "a set of exactly one batch is enough"


@pytest.mark.parametrize(
    ("accumulate", "processes", "works"), [(1, 3, 9), (2, 3, 12), (4, 4, 16), (1, 16, 16)]
)
def test_a_batch_that_cannot_be_dealt_evenly_is_refused_with_one_that_can(
    grad_accum_steps, world_size, works
):
    stream = training(Numbers(64), grad_accum_steps=grad_accum_steps)
    with pytest.raises(
        UserError, match=f"{world_size} process.* {grad_accum_steps} micro-batch.*such as {works}"
    ):
        next(stream.micro_batches(0, 1, 0, world_size))
    assert next(
        training(Numbers(64), grad_accum_steps=grad_accum_steps, batch_size=works).micro_batches(
            0, 1, 0, world_size
        )
    )


# -------------------------------------------------------------------------------------------------------- validation


def held_out(
    dataset: Numbers, world_size: int, num_workers: int = 0, limit: int | None = None
) -> Iterator[Batch]:
    for rank in range(world_size):
        stream = EvalLoader(dataset, seed=3, batch_size=4, num_workers=num_workers)
        yield from stream.batches(rank, world_size, limit)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 4, 19])
def test_each_held_out_example_is_met_exactly_once_on_any_number_of_processes(count, world_size):
    names = Counter(name for batch in held_out(Numbers(count), world_size) for name in batch.names)
    assert names == Counter(f"{index}.png" for index in range(count))


@pytest.mark.parametrize(("processes", "workers"), [(2, 0), (4, 0), (1, 2)])
def test_the_batches_of_a_validation_are_the_same_on_any_number_of_processes(
    world_size, num_workers
):
    """Not only their examples: a network may round a batch of four otherwise than one of three."""
    alone = {tuple(batch.names): batch.examples for batch in held_out(Numbers(19), 1)}
    shared = {
        tuple(batch.names): batch.examples
        for batch in held_out(Numbers(19), world_size, num_workers)
    }
    assert alone.keys() == shared.keys()
    assert all(torch.equal(alone[names], shared[names]) for names in alone)


def test_a_held_out_example_is_the_same_at_every_validation():
    first, second = (list(held_out(Numbers(6), 1)) for _ in range(2))
    assert all(torch.equal(a.examples, b.examples) for a, b in zip(first, second))


def test_a_held_out_example_that_cannot_be_read_is_left_out_and_told():
    batches = list(held_out(Numbers(9, broken={0, 1, 2, 3, 6}), 1))
    assert [batch.names for batch in batches] == [[], ["4.png", "5.png", "7.png"], ["8.png"]]
    assert batches[0].examples is None and len(batches[0]) == 0
    assert [name for batch in batches for name, _ in batch.rejected] == [
        "0.png",
        "1.png",
        "2.png",
        "3.png",
        "6.png",
    ]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_first_few_can_be_asked_for(world_size):
    names = sorted(
        name for batch in held_out(Numbers(19), world_size, limit=6) for name in batch.names
    )
    assert names == sorted(f"{index}.png" for index in range(6))

"""Evaluation and samples: results do not depend on the number of processes, unreadable examples
are left out, and samples are spread over the held-out set."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.data.dataset import spread_indices
from tessera.data.loader import EvalLoader
from tessera.engine import engine as engine_module
from tessera.engine.distributed import Distributed
from tessera.engine.evaluation import (
    Evaluation,
    Sample,
    evaluate_task,
    interleave,
    make_samples,
    save_samples,
)
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, Rows, Task
from tessera.run.errors import UserError
from tests.engine.small_task import AddTask, NumberDataset, TextMedia, small_engine


class NumberStream:
    """Batches of three consecutive numbers."""

    batch_size = 3

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def spread(self, count: int) -> list[int]:
        return spread_indices(self.count, count)

    def batches(
        self, rank: int, world_size: int, indices: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        numbers = list(range(self.count) if indices is None else indices)
        for start in range(rank * 3, len(numbers), world_size * 3):
            some = numbers[start : start + 3]
            yield Batch(torch.tensor(some), [str(number) for number in some], some)


class CollectTask(Task):
    """Return the collected totals as metrics, and each number as a sample."""

    def eval_step(self, batch: Batch) -> dict[str, Any]:
        even = batch.examples[batch.examples % 2 == 0]
        return {
            "sum": batch.examples.sum(),
            "even": Rows(even),
            "large": Rows(batch.examples + 2**60),
        }

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, Any]:
        return {name: value.tolist() for name, value in totals.items()}

    def sample(self, batch: Batch) -> list[Any]:
        return [TextMedia(str(int(number))) for number in batch.examples]


class ThreadedDistributed(Distributed):
    """One of several ranks that run as threads of this process."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier):
        super().__init__(rank, len(slots))
        self.slots, self.barrier = slots, barrier

    def exchange(self, value: Any) -> list[Any]:
        self.slots[self.rank] = value
        self.barrier.wait(timeout=600)
        values = list(self.slots)
        self.barrier.wait(timeout=600)
        return values

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.exchange(data)

    def all_reduce_max(self, number: int) -> int:
        return max(self.exchange(number))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.exchange(tensor)).sum(0)


def run_ranks(world_size: int, function: Callable[[Distributed], Any]) -> list[Any]:
    """Call a function on every rank at the same time and return the results."""
    slots, barrier = [None] * world_size, threading.Barrier(world_size)
    ranks = [ThreadedDistributed(rank, slots, barrier) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(function, ranks))


# ---- evaluation


def test_rows_have_the_order_of_the_batches_and_keep_their_type() -> None:
    found = evaluate_task(CollectTask(), NumberStream(8), Distributed())
    order = interleave(NumberStream(8))
    assert found.metrics["even"] == [n for n in order if n % 2 == 0]
    assert found.metrics["large"] == [2**60 + n for n in order], "floats would be rounded"
    assert found.metrics["sum"] == 28 and found.num_examples == 8


def test_each_batch_is_spread_over_the_set() -> None:
    assert interleave(NumberStream(9)) == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    assert interleave(NumberStream(2)) == [0, 1] and interleave(NumberStream(0)) == []
    assert sorted(interleave(NumberStream(13))) == list(range(13))


@pytest.mark.parametrize("count", [8, 2, 13])
def test_three_processes_compute_what_one_process_computes(count: int) -> None:
    calls: list[int] = []

    def evaluate(dist: Distributed) -> Evaluation:
        return evaluate_task(
            CollectTask(), NumberStream(count), dist, lambda batch: calls.append(dist.rank)
        )

    expected = evaluate_task(CollectTask(), NumberStream(count), Distributed())
    assert sorted(expected.metrics["large"]) == [2**60 + n for n in range(count)]
    assert sorted(expected.metrics["even"]) == list(range(0, count, 2))
    assert expected.metrics["sum"] == sum(range(count)) and expected.num_examples == count
    assert run_ranks(3, evaluate) == [expected] * 3
    assert calls.count(0) == calls.count(1) == calls.count(2) == -(-count // 9), (
        "all processes call on_batch equally often"
    )


def test_an_empty_set_cannot_be_evaluated() -> None:
    with pytest.raises(UserError, match="no readable example"):
        evaluate_task(CollectTask(), NumberStream(0), Distributed())


UNREADABLE = (1, *range(8, 16), 19)
"""One example of the first batch of eight, the whole second batch, and one of the last batch."""


def test_validation_counts_and_averages_only_readable_examples() -> None:
    held_out = NumberDataset(20, UNREADABLE)
    stream = EvalLoader(held_out, seed=0, batch_size=8)
    task = AddTask(OptimizerConfig())
    found = evaluate_task(task, stream, Distributed())
    readable = [i for i in range(20) if i not in UNREADABLE]
    rows = torch.from_numpy(held_out.rows[readable])
    errors = (task.model(rows)[:, 0] - rows.sum(1)).square().detach()
    assert found.num_examples == len(readable) == 10
    assert found.metrics["error"] == pytest.approx(float(errors.mean()), rel=1e-5)
    for one in run_ranks(2, lambda dist: evaluate_task(copy.deepcopy(task), stream, dist)):
        assert one.num_examples == 10
        assert one.metrics["error"] == pytest.approx(found.metrics["error"], rel=1e-12)


def test_a_set_without_readable_examples_cannot_be_evaluated() -> None:
    stream = EvalLoader(NumberDataset(3, range(3)), seed=0, batch_size=8)
    with pytest.raises(UserError, match="no readable example"):
        evaluate_task(AddTask(OptimizerConfig()), stream, Distributed())


def test_a_run_logs_the_readable_count_and_the_unreadable_names(tmp_path: Path) -> None:
    engine = small_engine(tmp_path, held_out=NumberDataset(20, UNREADABLE), steps=2)
    engine.run()
    (record,) = engine.directory.read_records("validation")
    assert record["step"] == 2 and record["examples"] == 10
    assert {"val/error", "val_ema/error"} <= record.keys()
    notes = engine.directory.read_notes("rejected.jsonl")
    names = sorted(note["example"] for note in notes)
    assert names == sorted(f"row {i}" for i in UNREADABLE), "once each"
    assert all("the file is empty" in note["reason"] for note in notes)


# ---- samples


class FolderDataset(NumberDataset):
    """Rows in named folders of different sizes."""

    def __init__(self, **sizes: int):
        super().__init__(sum(sizes.values()))
        self.names = [f"{folder}/{i}" for folder, size in sizes.items() for i in range(size)]

    def name(self, index: int) -> str:
        return self.names[index]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (3, "cats/0 dogs/0 owls/0"),
        (2, "cats/0 dogs/0"),
        (6, "cats/0 cats/33 cats/66 dogs/0 dogs/2 owls/0"),
        (8, "cats/0 cats/25 cats/50 cats/75 dogs/0 dogs/1 dogs/2 owls/0"),
    ],
)
def test_every_folder_has_samples_whatever_its_size(count: int, expected: str) -> None:
    dataset = FolderDataset(cats=100, dogs=4, owls=1)
    loader = EvalLoader(dataset, seed=0, batch_size=2)
    assert [dataset.name(i) for i in loader.spread(count)] == expected.split()
    assert loader.spread(1000) == list(range(105))


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [
        (32, 4, [0, 8, 16, 24]),
        (10, 4, [0, 2, 5, 7]),
        (5, 5, [0, 1, 2, 3, 4]),
        (3, 16, [0, 1, 2]),
        (0, 16, []),
    ],
)
def test_sample_indices_are_spread_evenly(total: int, count: int, expected: list[int]) -> None:
    assert spread_indices(total, count) == expected


def test_gaps_between_sample_indices_differ_by_at_most_one() -> None:
    for total in range(1, 60):
        for count in range(1, total + 1):
            indices = spread_indices(total, count)
            gaps = [b - a for a, b in zip(indices, [*indices[1:], total])]
            assert len(indices) == count and indices[0] == 0, (total, count)
            assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1, (total, count, gaps)


@pytest.mark.parametrize("world_size", [1, 3])
def test_samples_are_ordered_and_named_on_every_process(world_size: int) -> None:
    samples = run_ranks(
        world_size, lambda dist: make_samples(CollectTask(), NumberStream(32), 8, dist)
    )
    expected = [Sample(TextMedia(str(i)), str(i)) for i in range(0, 32, 4)]
    assert samples == [expected] * world_size


def test_saved_samples_are_numbered_files_and_a_labelled_sheet(tmp_path: Path) -> None:
    samples = [Sample(TextMedia("red"), "a.png"), Sample(TextMedia("blue"), "b.png")]
    assert save_samples(samples, tmp_path) == tmp_path / "sheet.txt"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0000.txt": "red",
        "0001.txt": "blue",
        "sheet.txt": "a.png: red\nb.png: blue",
    }


def test_captions_are_the_labels_of_samples_and_in_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tmp_path, steps=2, sample_count=2)
    captioned = [
        Sample(TextMedia("1"), "a.png", "a red star"),
        Sample(TextMedia("2"), "b.png", ""),
    ]
    monkeypatch.setattr(engine_module, "make_samples", lambda *_: captioned)
    engine.run()
    folder = engine.directory.samples / "000002"
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["captions"] == ["a red star", ""]
    assert settings["examples"] == ["a.png", "b.png"]
    assert (folder / "sheet.txt").read_text() == "a red star: 1\nb.png: 2"


def test_no_samples_make_no_files(tmp_path: Path) -> None:
    assert save_samples([], tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_saves_samples_spread_over_the_held_out_set(tmp_path: Path) -> None:
    """Their settings name each example, and unreadable examples are missing from both."""
    held_out = NumberDataset(32, unreadable=[16])
    engine = small_engine(tmp_path, held_out=held_out, steps=4, sample_every=2, sample_count=4)
    engine.run()
    names = ["row 0", "row 8", "row 24"]
    for step in (2, 4):
        folder = engine.directory.samples / f"{step:06d}"
        settings = json.loads((folder / "settings.json").read_text())
        assert settings == {"step": step, "examples": names}
        texts = [(folder / f"{i:04d}.txt").read_text() for i in range(3)]
        assert texts == [f"{held_out.rows[i].sum():.3f}" for i in (0, 8, 24)]
        lines = (folder / "sheet.txt").read_text().splitlines()
        assert lines == [f"{name}: {text}" for name, text in zip(names, texts)]
        assert len(list(folder.iterdir())) == 5

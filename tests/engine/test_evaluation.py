"""Measuring: sums are added, rows are laid one below the other in the order of the set, on any
number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tessera.engine.distributed import Distributed
from tessera.engine.evaluation import evaluate_task
from tessera.engine.task import Batch, Rows, Task
from tessera.run.directory import UserError


class Stream:
    batch_size = 3

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batches(self, rank: int, processes: int, limit: int | None = None) -> Iterator[Batch]:
        for start in range(rank * 3, self.count, processes * 3):
            numbers = list(range(start, min(start + 3, self.count)))
            yield Batch(torch.tensor(numbers), [str(n) for n in numbers], numbers)


class Collecting(Task):
    """Sees even numbers only, and tells all it is told."""

    def eval_step(self, batch: Batch) -> dict[str, Any]:
        even = batch.examples[batch.examples % 2 == 0]
        return {
            "sum": batch.examples.sum(),
            "even": Rows(even),
            "large": Rows(batch.examples + 2**60),
        }

    def compute_metrics(self, totals: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: value.tolist() for name, value in totals.items()}


class Several(Distributed):
    """One of several processes; what the others would send was collected before."""

    def __init__(self, rank: int, processes: int, others: dict[int, list[list[Any]]]):
        super().__init__(rank, processes)
        self.sent: list[list[Any]] = []
        self.others = others

    def lists(self, items: list[Any]) -> list[Any]:
        self.sent.append(items)
        number = len(self.sent) - 1
        hands = {rank: sent[number] for rank, sent in self.others.items()} | {self.rank: items}
        return [item for rank in sorted(hands) for item in hands[rank]]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_rows_come_in_the_order_of_the_set_and_keep_their_type() -> None:
    found = evaluate_task(Collecting(), Stream(8), Distributed())
    assert found["even"] == [0, 2, 4, 6] and found["sum"] == 28
    assert found["large"] == [2**60 + n for n in range(8)], "as floats they would be rounded"


@pytest.mark.parametrize("count", [8, 2, 13])
def test_rows_are_the_same_on_three_processes(count: int) -> None:
    sent: dict[int, list[list[Any]]] = {}
    for rank in range(3):
        dist = Several(rank, 3, {})
        measure_quietly(count, dist)
        sent[rank] = dist.sent
    for rank in range(3):
        found = evaluate_task(
            Collecting(),
            Stream(count),
            Several(rank, 3, {other: sent[other] for other in sent if other != rank}),
        )
        assert found["large"] == [2**60 + n for n in range(count)] and found["even"] == list(
            range(0, count, 2)
        )


def measure_quietly(count: int, dist: Several) -> None:
    """A process by itself may have seen nothing at all."""
    try:
        evaluate_task(Collecting(), Stream(count), dist)
    except UserError:
        assert count <= 3 * dist.rank


def test_of_nothing_nothing_can_be_measured() -> None:
    with pytest.raises(UserError, match="no readable example"):
        evaluate_task(Collecting(), Stream(0), Distributed())

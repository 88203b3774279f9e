"""Measuring a task on held-out examples and making samples, shared by runs in training and by verbs
on finished ones.

The batches are the same whatever the number of processes, each process takes every n-th of them,
and observations are summed in double precision, or collected in the order of the batches: so the
numbers are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tessera.engine.distributed import Distributed
from tessera.engine.modes import eval_mode
from tessera.engine.task import Batch, Rows, Task
from tessera.run.directory import UserError

NOTHING_HELD_OUT = (
    "The held-out set has no readable example, so nothing can be measured. `tessera check` tells why; where it is small, hold "
    "out a larger share."
)


class ValidationStream(Protocol):
    batch_size: int

    def __len__(self) -> int: ...
    def batches(self, rank: int, processes: int, limit: int | None = None) -> Iterator[Batch]: ...


def evaluate_task(
    task: Task,
    stream: ValidationStream,
    dist: Distributed,
    on_batch: Callable[[Batch | None], None] = lambda batch: None,
) -> dict[str, float]:
    """The task's numbers over the whole stream. `on_batch` is called equally often on every
    process."""
    totals: dict[str, Tensor] = {}
    rows: list[tuple[int, dict[str, Tensor]]] = []
    with eval_mode(task):
        for i, batch in enumerate(lockstep_batches(stream, len(stream), dist)):
            on_batch(batch)
            if batch is None or not len(batch):
                continue
            seen = task.eval_step(batch.to(dist.device))
            for name, value in seen.items():
                if isinstance(value, Tensor):
                    totals[name] = (
                        totals[name] + value.double() if name in totals else value.double()
                    )
            collected = {
                name: value.values.cpu() for name, value in seen.items() if isinstance(value, Rows)
            }
            rows.append((i * dist.world_size + dist.rank, collected))
        return task.compute_metrics(_together(totals, rows, dist))


def make_samples(
    task: Task,
    stream: ValidationStream,
    count: int,
    dist: Distributed,
    on_batch: Callable[[Batch | None], None] = lambda batch: None,
) -> list[Any]:
    """Media of the first `count` examples in their order, on every process; each makes its own
    share."""
    made: list[tuple[int, list[Any]]] = []
    with eval_mode(task):
        for i, batch in enumerate(lockstep_batches(stream, count, dist)):
            on_batch(batch)
            if batch is not None and len(batch):
                made.append((i * dist.world_size + dist.rank, task.sample(batch.to(dist.device))))
    return [
        item
        for _, items in sorted(dist.all_gather_object(made), key=lambda one: one[0])
        for item in items
    ]


def lockstep_batches(
    stream: ValidationStream, count: int, dist: Distributed
) -> Iterator[Batch | None]:
    """This process's batches of the first `count` examples; None in a last round that has none for
    it."""
    batches = stream.batches(dist.rank, dist.world_size, limit=count)
    for _ in range(-(-min(count, len(stream)) // (stream.batch_size * dist.world_size))):
        yield next(batches, None)


def save_media(media: list[Any], folder: Path) -> Path | None:
    """Each item as a file of its own, and all of them on one sheet to look at; gives back the
    sheet."""
    for number, item in enumerate(media):
        item.save(folder / f"{number:04d}")
    return type(media[0]).sheet(media).save(folder / "sheet") if media else None


def _together(
    totals: dict[str, Tensor], rows: list[tuple[int, dict[str, Tensor]]], dist: Distributed
) -> dict[str, Tensor]:
    """What all processes have seen: the sums of the whole set, and its rows."""
    found = _summed(totals, dist) | _collected(rows, dist)
    if not found:
        raise UserError(NOTHING_HELD_OUT)
    return found


def _summed(totals: dict[str, Tensor], dist: Distributed) -> dict[str, Tensor]:
    """A process whose share was empty joins the sum with zeros of the right shapes."""
    known = dist.all_gather_object([{name: tuple(value.shape) for name, value in totals.items()}])
    shapes = {name: shape for one in known for name, shape in one.items()}
    zero = torch.zeros((), dtype=torch.float64, device=dist.device)
    return {
        name: dist.all_reduce_sum(totals.get(name, zero.expand(shapes[name])))
        for name in sorted(shapes)
    }


def _collected(rows: list[tuple[int, dict[str, Tensor]]], dist: Distributed) -> dict[str, Tensor]:
    """The rows of all batches in the order of the batches, on the CPU."""
    found: dict[str, list[Tensor]] = {}
    for _, seen in sorted(dist.all_gather_object(rows), key=lambda one: one[0]):
        for name, values in seen.items():
            found.setdefault(name, []).append(values)
    return {name: torch.cat(parts) for name, parts in found.items()}

"""Evaluation on held-out examples and samples, for runs in training and for trained runs.

Batches do not depend on the number of processes; process r of n evaluates every n-th batch. Sums
are accumulated in double precision and rows are collected in the order of the batches, so the
metrics are those of a single process.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tessera.engine.distributed import Distributed
from tessera.engine.modes import eval_mode
from tessera.engine.task import Batch, Media, Rows, Saveable, Task, copy_batch, prepare_batch
from tessera.run.directory import Json
from tessera.run.errors import UserError

NOTHING_HELD_OUT = (
    "The held-out set has no readable example, so nothing can be evaluated. `tessera check` shows "
    "the reasons; if the set is small, hold out a larger fraction."
)

OnBatch = Callable[[Batch | None], None]


class EvalStream(Protocol):
    """Batches of held-out examples."""

    batch_size: int

    def __len__(self) -> int: ...
    def spread(self, count: int) -> list[int]:
        """Return `count` indices spread over the examples, or all if there are fewer."""

    def batches(
        self, rank: int, world_size: int, indices: Sequence[int] | None = None
    ) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Evaluation:
    metrics: dict[str, float]
    num_examples: int
    """The number of examples that could be read."""
    histograms: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A medium with the name and the caption of the held-out example it was made from."""

    media: Media
    name: str
    caption: str = ""
    """The caption, or "" if captions are not used."""

    @property
    def label(self) -> str:
        return self.caption or self.name


def evaluate_task(
    task: Task, stream: EvalStream, dist: Distributed, on_batch: OnBatch = lambda batch: None
) -> Evaluation:
    """Compute the task's metrics over the whole stream.

    `on_batch` is called equally often on every process.
    """
    sums: dict[str, Tensor] = {}
    rows: list[tuple[int, dict[str, Tensor]]] = []
    count = torch.zeros((), dtype=torch.float64, device=dist.device)
    with eval_mode(task):
        for number, batch in lockstep_batches(stream, interleave(stream), dist):
            on_batch(batch)
            if batch is None or not len(batch):
                continue
            count += len(batch)
            results = task.eval_step(prepare_batch(task, batch, dist.device))
            for name, value in results.items():
                if isinstance(value, Tensor):
                    sums[name] = sums[name] + value.double() if name in sums else value.double()
            collected = {n: v.values.cpu() for n, v in results.items() if isinstance(v, Rows)}
            rows.append((number, collected))
        totals = gather_totals(sums, rows, dist)
        if not totals:
            raise UserError(NOTHING_HELD_OUT)
        num_examples = int(dist.all_reduce_sum(count))
        histograms = task.compute_histograms(totals)
        return Evaluation(task.compute_metrics(totals), num_examples, histograms)


def make_samples(
    task: Task,
    stream: EvalStream,
    count: int,
    dist: Distributed,
    on_batch: OnBatch = lambda batch: None,
) -> list[Sample]:
    """Make samples of `count` examples spread over the stream, on every process.

    Raises:
        FloatingPointError: If the network returns values that are not finite, on any process.
    """
    made: list[tuple[int, list[Sample]]] = []
    has_failed = False
    with eval_mode(task):
        for number, batch in lockstep_batches(stream, stream.spread(count), dist):
            on_batch(batch)
            if batch is not None and len(batch):
                try:
                    media = task.sample(copy_batch(batch, dist.device))
                except FloatingPointError:  # raised below: other processes have batches left
                    has_failed = True
                    continue
                captions = getattr(batch.examples, "captions", None) or [""] * len(batch)
                rows = zip(media, batch.names, captions, strict=True)
                made.append((number, [Sample(*row) for row in rows]))
    if dist.all_reduce_any(has_failed):
        raise FloatingPointError("The network returned values that are not finite.")
    return gather_samples(made, dist)


def gather_samples(made: list[tuple[int, list[Sample]]], dist: Distributed) -> list[Sample]:
    """Return the samples of all processes in the order of their batches."""
    if dist.world_size == 1:
        return [sample for _, samples in made for sample in samples]
    arrays: dict[str, Tensor] = {}
    rows: list[Any] = [
        [number, one.name, one.caption, pack_media(one.media, f"{number}/{i}", arrays)]
        for number, samples in made
        for i, one in enumerate(samples)
    ]
    tensors = {k: v for one in dist.all_gather_tensors(arrays) for k, v in one.items()}
    gathered = sorted(dist.all_gather_json(rows), key=lambda row: row[0])
    return [
        Sample(unpack_media(content, tensors), name, caption)
        for _, name, caption, content in gathered
    ]


def pack_media(media: object, key: str, arrays: dict[str, Tensor]) -> Json:
    """Describe a medium as JSON: its class and fields; arrays are added to `arrays`."""
    if not dataclasses.is_dataclass(media):
        raise TypeError(
            f"Samples of several processes must be dataclasses, got {type(media).__name__}."
        )
    fields: Json = {}
    for one in dataclasses.fields(media):
        value = getattr(media, one.name)
        if hasattr(value, "__array__"):
            arrays[f"{key}/{one.name}"] = torch.as_tensor(value)
            value = {"array": f"{key}/{one.name}"}
        elif dataclasses.is_dataclass(value):
            value = {"media": pack_media(value, f"{key}/{one.name}", arrays)}
        fields[one.name] = value
    kind = type(media)
    return {"class": [kind.__module__, kind.__qualname__], "fields": fields}


def unpack_media(content: Json, tensors: dict[str, Tensor]) -> Media:
    """Build a medium of a class that is already imported: a dataclass that can be saved."""
    module, name = content["class"]
    kind: Any = functools.reduce(getattr, name.split("."), sys.modules[module])
    if not hasattr(kind, "__dataclass_fields__") or not hasattr(kind, "save"):
        raise TypeError(f"{module}.{name} is not a class of media.")
    fields = {}
    for name, value in content["fields"].items():
        if isinstance(value, dict) and "array" in value:
            value = tensors[value["array"]].numpy()
        elif isinstance(value, dict) and "media" in value:
            value = unpack_media(value["media"], tensors)
        fields[name] = value
    medium: Media = kind(**fields)
    return medium


def interleave(stream: EvalStream) -> list[int]:
    """Return all indices in an order in which each batch is spread over the examples.

    Neighbours are often in one folder and of one class, and some metrics compare the examples of a
    batch with each other.
    """
    stride = max(1, -(-len(stream) // stream.batch_size))
    return [index for first in range(stride) for index in range(first, len(stream), stride)]


def lockstep_batches(
    stream: EvalStream, indices: Sequence[int], dist: Distributed
) -> Iterator[tuple[int, Batch | None]]:
    """Yield this process's numbered batches, and None where only other processes have one left."""
    batches = stream.batches(dist.rank, dist.world_size, indices)
    for i in range(-(-len(indices) // (stream.batch_size * dist.world_size))):
        yield i * dist.world_size + dist.rank, next(batches, None)


def save_samples(samples: list[Sample], folder: Path, suffix: str = "") -> Path | None:
    """Save each sample as a file and all of them as a contact sheet; return the sheet's path.

    `suffix` is the format of the files, by default that of the medium.
    """
    for number, sample in enumerate(samples):
        sample.media.save(folder / f"{number:04d}{suffix}")
    if not samples:
        return None
    return make_sheet(samples).save(folder / "sheet")


def make_sheet(samples: list[Sample]) -> Saveable:
    """Return the contact sheet of at least one sample."""
    media, labels = [one.media for one in samples], [one.label for one in samples]
    return type(media[0]).sheet(media, labels)


def gather_totals(
    sums: dict[str, Tensor], rows: list[tuple[int, dict[str, Tensor]]], dist: Distributed
) -> dict[str, Tensor]:
    """Reduce the sums of all processes and concatenate their rows in the order of the batches.

    A process without batches contributes zeros of the right shapes.
    """
    known = dist.all_gather_json([{name: list(value.shape) for name, value in sums.items()}])
    shapes = {name: shape for one in known for name, shape in one.items()}
    zero = torch.zeros((), dtype=torch.float64, device=dist.device)
    totals = {
        name: dist.all_reduce_sum(sums.get(name, zero.expand(shapes[name])))
        for name in sorted(shapes)
    }
    collected: dict[str, list[Tensor]] = {}
    own = {f"{number}/{name}": one for number, some in rows for name, one in some.items()}
    gathered = {k: v for one in dist.all_gather_tensors(own) for k, v in one.items()}
    for key in sorted(gathered, key=lambda key: int(key.partition("/")[0])):
        collected.setdefault(key.partition("/")[2], []).append(gathered[key])
    return totals | {name: torch.cat(parts) for name, parts in collected.items()}

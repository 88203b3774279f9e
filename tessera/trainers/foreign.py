"""Models that were not built by this package: how a trainer trains the object that it is given.

A model is recognised by what it offers (the parameters of its `forward`, its attributes), never by
its class, so that neither the research packages nor a user's own module has to be imported. There
is one file for each contract: `foreign_audio.py`, `foreign_music.py`, `foreign_videos.py`,
`foreign_images.py` and `foreign_meshes.py`.

Such a model draws its random numbers from the global generators. They are seeded for each
micro-batch by its first example, so that a resumed run equals one without interruption, and two
processes equal one process with twice as many micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tessera.data.dataset import ExampleDataset, Split, Subset, read_item, split_names
from tessera.data.errors import UnreadableFile
from tessera.data.loader import check_num_examples
from tessera.engine.distributed import Distributed
from tessera.engine.engine import Engine, EngineConfig
from tessera.engine.modes import hash_seed, seed
from tessera.engine.task import Batch, BestMetric, Loss, Task, TensorExamples
from tessera.run.config import encode
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import claim_directory, open_engine

MODEL, DISCRIMINATOR, EVALUATION = 0, 1, 2
"""Parts of the seed of a micro-batch, one for each call of a model."""


# ---- recognising a model


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a model's forward method; decorators are followed."""
    return inspect.signature(model.forward).parameters


def check_contract(
    model: object,
    *,
    trainer: str,
    ours: str,
    parameters: Sequence[str] = (),
    attributes: Sequence[str] = (),
) -> nn.Module:
    """Return the model if its `forward` and its attributes are those that a trainer needs.

    Raises:
        UserError: The object is no module, or lacks some of them.
    """
    expected = [f"forward(..., {', '.join(parameters)})", *attributes]
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{trainer} got a {type(model).__name__}, but trains {ours}, or an nn.Module with "
            f"{', '.join(expected)}."
        )
    names = forward_parameters(model)
    missing = [f"the parameter {name!r} of forward" for name in parameters if name not in names]
    missing += [f"the attribute {name!r}" for name in attributes if not hasattr(model, name)]
    if missing:
        raise UserError(
            f"{trainer} cannot train a {type(model).__name__}: it lacks {' and '.join(missing)}. "
            f"Give {ours}, or a module with {', '.join(expected)}; for any other module write a "
            "task, see docs/your-own-task.md."
        )
    return model


# ---- parts of a model


class ModelPart(nn.Module):
    """Some of the children of a model as one network, with the names that they have in it."""

    def __init__(self, model: nn.Module, names: Sequence[str], parameters: bool = False):
        super().__init__()
        for name, child in model.named_children():
            if name in names:
                self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            if parameters:
                self.register_parameter(name, parameter)


def split_model(model: nn.Module, others: Sequence[str]) -> ModelPart:
    """Return everything of a model except the named children."""
    names = [name for name, _ in model.named_children() if name not in others]
    return ModelPart(model, names, parameters=True)


# ---- data


@dataclass(frozen=True)
class ConvertedDataset(ExampleDataset):
    """The examples of files, converted to what a foreign model takes."""

    dataset: ExampleDataset
    convert: Callable[[Any], Tensor]
    """A function of one example."""

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        return self.dataset.name(index)

    def item(self, index: int, rng: np.random.Generator) -> Tensor:
        return self.convert(read_item(self.dataset, index, rng))

    def collate(self, examples: list[Tensor]) -> TensorExamples:
        return TensorExamples(torch.stack(examples))


def split_foreign(dataset: ExampleDataset, val_fraction: float, split_seed: int) -> Split:
    """Hold out a fraction of a dataset by the names of its items."""
    names = [dataset.name(index) for index in range(len(dataset))]
    train, held_out = split_names(names, val_fraction, split_seed)
    return Split(Subset(dataset, train), Subset(dataset, held_out))


def name_fields(item: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of an item by name: a dictionary, or a tuple in the order of `names`."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, (tuple, list)) and len(item) <= len(names):
        return dict(zip(names, item))
    raise UnreadableFile(
        f"an item is a {type(item).__name__}, but must be a dictionary or a tuple of at most "
        f"{len(names)} values ({', '.join(names)})"
    )


def pad_rows(rows: Sequence[Any], value: float) -> Tensor:
    """Stack tensors that differ in their first dimension, padded at the end."""
    tensors = [torch.as_tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


# ---- the task


@dataclass
class ForeignLoss:
    """The loss of one call of a foreign model, with the values that are logged beside it."""

    total: Tensor
    breakdown: dict[str, Tensor] = field(default_factory=dict)

    def to_loss(self) -> Loss:
        metrics: dict[str, Any] = {name: value.detach() for name, value in self.breakdown.items()}
        return Loss({"total": self.total}, metrics)


class ForeignTask(Task):
    """Base class: `model` is the object that was given, and subclasses call it."""

    best_metric = BestMetric(name="loss", higher_is_better=False)
    optimizer_keys: Mapping[str, str] = {"model": "optim"}
    """Update -> the key of its optimizer in a checkpoint of the research package."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def eval_loss(self, batch: Batch) -> dict[str, Tensor] | None:
        """Return means over a batch of held-out examples; None if the batch is too small."""
        raise NotImplementedError

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        seed_model(batch, EVALUATION)
        means = self.eval_loss(batch)
        if means is None:
            return {}
        count = torch.tensor(float(len(batch)), device=next(iter(means.values())).device)
        return {name: mean.detach() * count for name, mean in means.items()} | {"examples": count}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        count = totals.pop("examples")
        return {name: float(total / count) for name, total in totals.items()}


def seed_model(batch: Batch, call: int) -> None:
    """Seed the global generators for one call of a model on a micro-batch."""
    seed(hash_seed(batch.seeds[0], call))


def breakdown_values(breakdown: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the scalar tensors of a named tuple by name; vectors are summed."""
    for name, value in getattr(breakdown, "_asdict", dict)().items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield name, value.sum()


# ---- the run


@dataclass
class ForeignRun:
    """A task with a foreign model, its examples and its settings."""

    task: ForeignTask
    split: Split
    engine: EngineConfig
    arguments: Json
    """Settings of the trainer that are stored and compared when a run is resumed."""

    @property
    def settings(self) -> Json:
        kind = type(self.task.model)
        return {
            "recipe": None,
            "trainer": {
                "task": type(self.task).__name__,
                "model": f"{kind.__module__}.{kind.__qualname__}",
                **self.arguments,
            },
            "engine": encode(self.engine),
        }

    def open(self, directory: RunDirectory, on_log: Callable[[Json], None]) -> Engine:
        """Build an engine at the newest checkpoint of the directory, or at step 0."""
        check_num_examples(self.split.train, self.engine.batch_size)
        dist = Distributed.from_environment()
        dist.on_main(lambda: claim_directory(directory, self.settings))
        return open_engine(
            self.task,
            self.split,
            self.engine,
            directory,
            self.settings,
            contiguous=True,
            on_log=on_log,
        )

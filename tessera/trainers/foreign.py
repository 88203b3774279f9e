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

import numpy as np
import torch
from torch import Tensor, nn

from tessera.data.dataset import ExampleDataset, Split, read_item
from tessera.data.errors import UnreadableFile
from tessera.data.source import DatasetSource
from tessera.engine.config import EngineConfig
from tessera.engine.distributed import Distributed
from tessera.engine.engine import Engine
from tessera.engine.modes import hash_seed, seed
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Loss, Task, TensorExamples, Update
from tessera.run.config import encode
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import check_split, claim_directory, open_engine

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


def freeze_vgg(model: nn.Module) -> list[str]:
    """Freeze the perceptual networks of a model, and return their names.

    The published trainers either give them to the optimizer or compute gradients that are never
    cleared.
    """
    names = [name for name, _ in model.named_children() if "vgg" in name]
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return names


# ---- data


@dataclass(frozen=True)
class ForeignDataset(DatasetSource):
    """Items of an object, each parsed on its own, so that unusable ones are skipped and noted."""

    parse: Callable[[object], object] = field(kw_only=True)
    """A function of one item that raises UnreadableFile if it cannot be used."""

    def item(self, index: int, rng: np.random.Generator) -> object:
        return self.parse(super().item(index, rng))


@dataclass(frozen=True)
class ConvertedDataset(ExampleDataset):
    """The examples of files, converted to what a foreign model takes."""

    dataset: ExampleDataset
    convert: Callable[..., Tensor]
    """A function of one example."""

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        return self.dataset.name(index)

    def item(self, index: int, rng: np.random.Generator) -> Tensor:
        return self.convert(read_item(self.dataset, index, rng))

    def collate(self, examples: list[Tensor]) -> TensorExamples:
        return TensorExamples(torch.stack(examples))


def convert_split(split: Split, convert: Callable[..., Tensor]) -> Split:
    """Convert the examples of files."""
    return Split(
        ConvertedDataset(split.train, convert), ConvertedDataset(split.validation, convert)
    )


def to_tensor(name: str, value: object) -> Tensor:
    """Return a tensor or an array of numbers as a tensor; `name` begins the error message."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UnreadableFile(
            f"{name} is a {type(value).__name__}, but must be a tensor or an array of numbers"
        ) from None


def pad_rows(rows: Sequence[Tensor], value: float) -> Tensor:
    """Stack tensors that differ in their first dimension, padded at the end."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


# ---- the task


@dataclass
class ForeignLoss:
    """The loss of one call of a foreign model, with the values that are logged beside it."""

    total: Tensor
    breakdown: dict[str, Tensor] = field(default_factory=dict)

    def to_loss(self) -> Loss:
        metrics = {name: value.detach() for name, value in self.breakdown.items()}
        return Loss({"total": self.total}, {**metrics})


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


class SingleLossTask(ForeignTask):
    """Base class for a model that is trained as a whole by one loss."""

    def __init__(self, model: nn.Module, optimizer: OptimizerConfig):
        super().__init__(model)
        self.updates = (
            Update(
                name="model",
                trains=self.model,
                loss=self.train_loss,
                optimizer=optimizer,
                find_unused=True,
            ),
        )

    def call(self, batch: Batch) -> ForeignLoss:
        """Call the model with a batch."""
        raise NotImplementedError

    def train_loss(self, batch: Batch, step: int) -> Loss:
        seed_model(batch, MODEL)
        return self.call(batch).to_loss()

    def eval_loss(self, batch: Batch) -> dict[str, Tensor] | None:
        loss = self.call(batch)
        return {"loss": loss.total, **loss.breakdown}


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
        check_split(self.split, self.engine)
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

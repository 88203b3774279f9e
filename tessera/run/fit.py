"""Train a task from Python in a run directory, and load its weights again.

    engine = fit(LossTask(model), dataset, out="runs/mine", steps=1000, batch_size=32)

The same call resumes a run that was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import nn

from tessera.data.dataset import ExampleDataset, Split, split_dataset
from tessera.data.source import DatasetSource, require_items
from tessera.engine import checkpoint
from tessera.engine.config import EngineConfig
from tessera.engine.distributed import Distributed
from tessera.engine.engine import Engine
from tessera.engine.task import Source, Task
from tessera.run.config import encode
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import UserError, as_user_error
from tessera.run.train import check_split, claim_directory, open_engine


def fit(
    task: Task,
    data: object,
    *,
    out: str | Path,
    validation: object = None,
    val_fraction: float = 0.05,
    collate: Callable[..., object] | None = None,
    settings: Json | None = None,
    on_log: Callable[[Json], None] | None = None,
    **engine: Any,
) -> Engine:
    """Train a task, or resume its run, and return the engine.

    Args:
        task: The task; `LossTask(model)` for a module that returns its loss.
        data: The training examples: a dataset of torch or any other object with a length and
            items, or a `Source`.
        out: The run directory.
        validation: The held-out examples; by default a fraction of `data`.
        val_fraction: The fraction of `data` that is held out; 0 validates on the training examples.
        collate: The function that makes a batch of several items; by default that of torch. It is
            not used for a `Source`.
        settings: Further settings to store in config.json and to compare when the run is resumed.
        on_log: Receives every record of metrics.jsonl.
        engine: The fields of EngineConfig, such as `steps`, `batch_size` and `seed`.
    """
    unknown = sorted(set(engine) - set(EngineConfig.__dataclass_fields__))
    if unknown:
        raise UserError(
            f"fit has no parameter {unknown[0]!r}: it takes its own parameters and the fields of "
            f"EngineConfig, {', '.join(EngineConfig.__dataclass_fields__)}."
        )
    with as_user_error(ValueError):
        config = EngineConfig(**engine)
    split = build_split(data, validation, val_fraction, collate)
    check_split(split, config)
    kind = type(task)
    stored: Json = {
        "recipe": None,
        "task": {"class": f"{kind.__module__}.{kind.__qualname__}"},
        "data": {"val_fraction": val_fraction},
        "engine": encode(config),
        "settings": settings or {},
    }
    directory, dist = RunDirectory(out), Distributed.from_environment()
    dist.on_main(lambda: claim_directory(directory, stored))
    opened = open_engine(task, split, config, directory, stored, contiguous=True, on_log=on_log)
    opened.run()
    return opened


def build_split(
    data: object,
    validation: object,
    val_fraction: float,
    collate: Callable[..., object] | None,
) -> Split:
    train = as_source(data, collate)
    if validation is not None:
        return Split(train, as_source(validation, collate))
    with as_user_error(ValueError):
        return split_dataset(train, val_fraction)


def as_source(data: object, collate: Callable[..., object] | None) -> ExampleDataset:
    """Return a source unchanged, and any other object with a length and items as one."""
    if isinstance(data, Source):
        return data  # type: ignore[return-value]
    items = require_items(data)
    return DatasetSource(items) if collate is None else DatasetSource(items, collate)


def load_weights(
    model: nn.Module, run: str | Path, weights: Literal["ema", "raw"] = "ema"
) -> nn.Module:
    """Load the weights of a run's newest checkpoint into a model, and return it."""
    file_name = "ema.safetensors" if weights == "ema" else "model.safetensors"
    found = checkpoint.load_newest(RunDirectory(run).checkpoints, file_name, print)
    if found is None:
        raise UserError(f"The run in {run} has no checkpoint: train it first.")
    checkpoint.load_strictly(model, found.tensors, f"model in {run}")
    return model

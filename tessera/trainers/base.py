"""The base class of the trainers: a run that can be trained, stepped, saved and loaded."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import torch
from torch import nn

from tessera.data.dataset import Split
from tessera.engine import checkpoint
from tessera.engine.checkpoint import Snapshot
from tessera.engine.engine import Engine
from tessera.engine.task import Task
from tessera.engine.updates import UpdateResult
from tessera.run.config import Run, encode
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import build_engine, read_results, write_model_card
from tessera.trainers.foreign import ForeignRun
from tessera.trainers.package_checkpoints import read_package_checkpoint

AnyModel = TypeVar("AnyModel", bound=nn.Module)
LogFn = Callable[[Json], None]


class Trainer(Generic[AnyModel]):
    result_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The names of the research package for what `train_step` returns: name -> our names, of which
    the first that exists is taken."""

    def __init__(
        self,
        run: Run | ForeignRun,
        results_folder: str | Path,
        task: Task | None = None,
        split: Split | None = None,
        *,
        extra_settings: Json | None = None,
    ) -> None:
        self._log_fn: LogFn | None = None
        self.run = run
        directory = RunDirectory(results_folder)
        if isinstance(run, ForeignRun):
            self.engine: Engine = run.open(directory, self._on_log)
        else:
            self.engine = build_engine(
                run,
                directory,
                task=task,
                split=split,
                extra_settings=extra_settings,
                on_log=self._on_log,
            )
        self._steps: Iterator[dict[str, UpdateResult]] = self.engine.steps()

    @property
    def steps(self) -> int:
        """The number of finished steps."""
        return self.engine.global_step

    @property
    def model(self) -> AnyModel:
        """The trained network with its raw weights, which are not averaged."""
        return self.engine.task.model

    @property
    def unwrapped_model(self) -> AnyModel:
        """The same as `model`, which is never wrapped."""
        return self.model

    @property
    def ema_model(self) -> AnyModel:
        """A copy of the model with the current EMA weights."""
        ema_model = copy.deepcopy(self.model)
        checkpoint.load_strictly(ema_model, self.engine.ema.state_dict(), "EMA")
        for parameter in ema_model.parameters():
            parameter.requires_grad = False
        return ema_model.eval()

    # ---- training

    def train(self, log_fn: LogFn | None = None) -> None:
        """Train all remaining steps; `log_fn` receives the record of each step and validation."""
        self._log_fn = log_fn
        for _ in self._steps:
            pass
        if self.is_main and isinstance(self.run, Run):
            directory = self.engine.directory
            if results := read_results(directory):
                write_model_card(self.run, directory, results)

    def train_step(self) -> dict[str, float]:
        """Train one step and return its losses; return {} after the last step.

        The losses have our names (`model/loss`) and those of the research package (`loss`).
        """
        results = next(self._steps, None)
        if results is None:
            return {}
        losses = {
            f"{update}/{name}": float(value)
            for update, result in results.items()
            for name, value in result.mean_logs().items()
        }
        aliases = {"loss": ("model/loss",), **self.result_names}
        found = {name: [key for key in keys if key in losses] for name, keys in aliases.items()}
        return losses | {name: losses[keys[0]] for name, keys in found.items() if keys}

    def valid_step(self) -> dict[str, float]:
        """Evaluate the EMA weights on the held-out examples, without logging."""
        with self.engine.ema.applied():
            return dict(self.engine.evaluate().metrics)

    # ---- checkpoints

    def save(self, path: str | Path, overwrite: bool = True) -> None:
        """Write a checkpoint to a folder; an interrupted write leaves no incomplete one."""

        def write() -> None:
            if not overwrite and Path(path).exists():
                raise UserError(f"{path} exists and overwrite is False: give another path.")
            checkpoint.write_to(Path(path), self.engine.saver.snapshot(self.steps))

        self.engine.dist.on_main(write)

    def load(self, path: str | Path, restore_optimizer: bool = True) -> None:
        """Restore weights, EMA, optimizers and step from a checkpoint.

        `path` is a folder that `save` or a run wrote, or a file that the trainer of the research
        package wrote. Without `restore_optimizer` training starts at step 0 with these weights.
        """
        loaded: list[Snapshot] = []  # only the main process reads it
        self.engine.dist.on_main(lambda: loaded.append(self._read_checkpoint(Path(path))))
        if loaded and not restore_optimizer:
            loaded = [without_optimizers(loaded[0], self.engine.saver.snapshot(self.steps))]
        self.engine.restore(loaded[0] if loaded else None)
        self.engine.dist.on_main(lambda: self.engine.directory.truncate_after(self.steps))
        self._steps = self.engine.steps()

    def _read_checkpoint(self, path: Path) -> Snapshot:
        if path.is_file():
            return read_package_checkpoint(path, self.engine)
        problem = checkpoint.find_corruption(path)
        if problem is not None:
            raise UserError(
                f"{path} cannot be loaded: {problem}. Give the folder of a complete checkpoint, "
                "such as one that save() wrote."
            )
        return checkpoint.read(path)

    # ---- processes

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def is_main(self) -> bool:
        return self.engine.dist.is_main

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return int(os.environ.get("LOCAL_RANK", "0")) == 0

    @property
    def is_distributed(self) -> bool:
        return self.engine.dist.world_size > 1

    def print(self, message: object) -> None:
        """Print on the main process, without disturbing the progress bar."""
        if self.is_main:
            self.engine.printer.print(str(message))

    def wait(self) -> None:
        """Return when all processes have called this method."""
        self.engine.dist.all_reduce_max(0)

    def log(self, **values: float) -> None:
        """Log values of your own at the current step, to metrics.jsonl and the trackers.

        Only the main process logs, so that it does not matter whether the others call it too.
        """
        self.engine.logger.log_on_main({"step": self.steps, "kind": "user", **values})

    @property
    def settings(self) -> Json:
        """The settings of the run, as in config.json."""
        return encode(self.run) if isinstance(self.run, Run) else self.run.settings

    def _on_log(self, record: Json) -> None:
        if self._log_fn is not None:
            self._log_fn(record)


def without_optimizers(snapshot: Snapshot, initial: Snapshot) -> Snapshot:
    """Return the weights of a checkpoint with the initial state of everything else."""
    tensors = {
        name: one for name, one in snapshot.tensors.items() if not name.startswith("optimizer.")
    }
    return Snapshot(0, tensors, initial.state)


def adopt_model(task: Task, model: nn.Module) -> None:
    """Make a task train the given model object instead of the one that it was built with.

    Updates that train a part of the model train the same part of the given one.
    """
    paths = {id(module): path for path, module in task.named_modules()}
    positions = [paths[id(update.trains)] for update in task.updates]
    task.model = model
    task.updates = tuple(
        replace(update, trains=task.get_submodule(position))
        for update, position in zip(task.updates, positions, strict=True)
    )

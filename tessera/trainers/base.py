"""The base class of the trainers: a run that can be trained, stepped, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from torch import nn

from tessera.data.dataset import Split
from tessera.engine import checkpoint
from tessera.engine.engine import Engine, UpdateResult
from tessera.engine.task import Task
from tessera.run.config import Run
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import build_engine, read_results, write_model_card

AnyModel = TypeVar("AnyModel", bound=nn.Module)
LogFn = Callable[[Json], None]


class Trainer(Generic[AnyModel]):
    def __init__(
        self,
        run: Run,
        results_folder: str | Path,
        task: Task | None = None,
        split: Split | None = None,
    ) -> None:
        self._log_fn: LogFn | None = None
        self.run = run
        self.engine: Engine = build_engine(
            run, RunDirectory(results_folder), task=task, split=split, on_log=self._on_log
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

    def train(self, log_fn: LogFn | None = None) -> None:
        """Train all remaining steps; `log_fn` receives the record of each step and validation."""
        self._log_fn = log_fn
        for _ in self._steps:
            pass
        if self.engine.dist.is_main:
            directory = self.engine.directory
            write_model_card(self.run, directory, read_results(directory))

    def train_step(self) -> dict[str, float]:
        """Train one step and return its losses; return {} after the last step."""
        results = next(self._steps, None)
        if results is None:
            return {}
        return {
            f"{update}/{name}": float(value)
            for update, result in results.items()
            for name, value in result.mean_logs().items()
        }

    def save(self, path: str | Path) -> None:
        """Write a checkpoint to a folder; an interrupted write leaves no incomplete one."""
        if self.engine.dist.is_main:
            checkpoint.write_to(Path(path), self.engine.snapshot())

    def load(self, path: str | Path) -> None:
        """Restore weights, EMA, optimizers and step from a checkpoint of `save` or of a run."""
        problem = checkpoint.find_corruption(Path(path))
        if problem is not None:
            raise UserError(
                f"{path} cannot be loaded: {problem}. Give the folder of a complete checkpoint, "
                "such as one that save() wrote."
            )
        self.engine.restore(checkpoint.read(Path(path)))
        self.engine.dist.on_main(lambda: self.engine.directory.truncate_after(self.steps))
        self._steps = self.engine.steps()

    def _on_log(self, record: Json) -> None:
        if self._log_fn is not None:
            self._log_fn(record)

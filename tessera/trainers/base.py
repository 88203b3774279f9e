"""What all front doors share: a run that is trained, stepped, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tessera.data.dataset import Split
from tessera.engine import checkpoint
from tessera.engine.engine import Engine, UpdateResult, mean_logs
from tessera.engine.task import Task
from tessera.run.config import Run
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import build_engine, card_of, write_card

Logs = dict[str, Any]


class Trainer:
    """Train, one step, save, load."""

    def __init__(
        self,
        run: Run,
        results_folder: str | Path,
        task: Task | None = None,
        split: Split | None = None,
    ) -> None:
        self._heard: Callable[[Logs], None] | None = None
        self.run = run
        self.engine: Engine = build_engine(
            run, RunDirectory(results_folder), task=task, split=split, on_log=self._tell
        )
        self._steps: Iterator[dict[str, UpdateResult]] = self.engine.steps()

    @property
    def steps(self) -> int:
        """Steps done so far."""
        return self.engine.done

    @property
    def model(self) -> Any:
        """The network in training, as the optimizer left it."""
        return self.engine.task.model

    def train(self, log_fn: Callable[[Logs], None] | None = None) -> None:
        """All steps that are left; `log_fn` hears each record: a step's numbers, or a
        validation's."""
        self._heard = log_fn
        for _ in self._steps:
            pass
        if self.engine.dist.is_main:
            write_card(self.run, self.engine.folder, card_of(self.engine.folder))

    def train_step(self) -> Logs:
        """One step, and its losses; nothing once the last step is done."""
        results = next(self._steps, None)
        if results is None:
            return {}
        return {
            f"{name}/{k}": float(v)
            for name, one in results.items()
            for k, v in mean_logs(one.logs).items()
        }

    def save(self, path: str | Path) -> None:
        """Everything needed to go on, as a folder of its own: complete, or not there."""
        if self.engine.dist.is_main:
            checkpoint.write_to(Path(path), self.engine.snapshot())

    def load(self, path: str | Path) -> None:
        """Goes to the step that `save`, or the run itself, wrote: weights, average, optimizers,
        step."""
        problem = checkpoint.find_corruption(Path(path))
        if problem is not None:
            raise UserError(f"{path} cannot be loaded: {problem}.")
        self.engine.restore(checkpoint.read(Path(path)))
        self.engine.dist.on_main(lambda: self.engine.folder.truncate_after(self.steps))
        self._steps = self.engine.steps()

    def _tell(self, record: Logs) -> None:
        if self._heard is not None:
            self._heard(record)

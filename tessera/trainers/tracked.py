"""Trainers that can also log to a project of Weights & Biases, inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from tessera.data.dataset import Split
from tessera.engine.logging import Trackers
from tessera.engine.task import Task
from tessera.run.config import Run, flatten
from tessera.run.directory import Json
from tessera.run.errors import UserError
from tessera.trainers.base import AnyModel, LogFn, Trainer
from tessera.trainers.foreign import ForeignRun


class TrackedTrainer(Trainer[AnyModel]):
    tracking_method: ClassVar[str]
    """The name of the method that opens the `with` block, as in the research package."""

    def __init__(
        self,
        run: Run | ForeignRun,
        results_folder: str | Path,
        task: Task | None = None,
        split: Split | None = None,
        *,
        extra_settings: Json | None = None,
        use_wandb_tracking: bool,
    ) -> None:
        self._use_wandb, self._project = use_wandb_tracking, ""
        super().__init__(run, results_folder, task, split, extra_settings=extra_settings)

    def train(self, log_fn: LogFn | None = None) -> None:
        self._check_project()
        super().train(log_fn)

    def train_step(self) -> dict[str, float]:
        self._check_project()
        return super().train_step()

    @contextmanager
    def _track(
        self, project: str, run_name: str | None, hps: Mapping[str, object] | None
    ) -> Iterator[None]:
        """Log every record to a project, too; its settings are those of the run and `hps`."""
        if not self._use_wandb:
            raise UserError(
                f"The project {project!r} was given for tracking, but this trainer was constructed "
                "without use_wandb_tracking=True: add it."
            )
        settings = flatten(self.settings)
        if run_name is not None:
            settings["run_name"] = run_name
        settings |= dict(hps or {})
        self._project = project
        folder, warn = self.engine.directory.path / project, self.engine.printer.print
        names = ("wandb",) if self.engine.dist.is_main else ()
        trackers = Trackers(names, folder, settings, warn, run_name)
        try:
            with self.engine.logger.forwarding_to(trackers):
                yield
        finally:
            trackers.close()
            self._project = ""

    def _check_project(self) -> None:
        """Raise UserError if tracking was requested and no project was given."""
        if self._use_wandb and not self._project:
            raise UserError(
                "use_wandb_tracking is True, but no project was given to track the run in: "
                f'train inside `with trainer.{self.tracking_method}("my-project"):`, or leave '
                "use_wandb_tracking out."
            )

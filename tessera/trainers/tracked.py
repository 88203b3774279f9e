"""Front doors whose records can also go to Weights & Biases, inside a `with` that names the
project."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tessera.data.dataset import Split
from tessera.engine.logging import Trackers
from tessera.engine.task import Task
from tessera.run.config import Run, encode, flatten
from tessera.run.errors import UserError
from tessera.trainers.base import Logs, Trainer


class TrackedTrainer(Trainer):
    tracking: ClassVar[str]
    """The method that opens the `with`, by the name it had in the research code."""

    def __init__(
        self,
        run: Run,
        results_folder: str | Path,
        task: Task,
        split: Split | None,
        *,
        use_wandb_tracking: bool,
    ) -> None:
        self._wants_wandb, self._project = use_wandb_tracking, ""
        self._trackers: Trackers | None = None
        super().__init__(run, results_folder, task, split)

    def train(self, log_fn: Callable[[Logs], None] | None = None) -> None:
        self._refuse_nameless_tracking()
        super().train(log_fn)

    def train_step(self) -> Logs:
        self._refuse_nameless_tracking()
        return super().train_step()

    @contextmanager
    def tracked_in(
        self, project: str, name: str | None, more: Mapping[str, Any] | None
    ) -> Iterator[None]:
        """Inside, every record also goes to this project, which is told all settings of the run,
        its name, and `more`."""
        if not self._wants_wandb:
            raise UserError(
                f"Records were to be tracked in {project!r}, but this trainer was made without use_wandb_tracking=True."
            )
        settings = (
            flatten(encode(self.run))
            | ({"run_name": name} if name is not None else {})
            | dict(more or {})
        )
        self._project = project
        if self.engine.dist.is_main:
            self._trackers = Trackers(
                ("wandb",), self.engine.folder.path / project, settings, self.engine.report.say
            )
        try:
            yield
        finally:
            if self._trackers is not None:
                self._trackers.close()
            self._project, self._trackers = "", None

    def _tell(self, record: Logs) -> None:
        if self._trackers is not None:
            self._trackers.log(record)
        super()._tell(record)

    def _refuse_nameless_tracking(self) -> None:
        if self._wants_wandb and not self._project:
            raise UserError(
                "use_wandb_tracking is on, but no project was named, so nothing would be tracked. "
                f'Train inside `with trainer.{self.tracking}("my-project"):`, or leave use_wandb_tracking out.'
            )

"""Logging of a run: metrics.jsonl, trackers, the progress bar, and files of skipped examples and
alarms.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from tessera.engine.distributed import Distributed
from tessera.engine.evaluation import Sample
from tessera.engine.guards import AlarmMonitor
from tessera.engine.task import Alarm, Batch
from tessera.engine.tracked_media import log_samples
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import printable

TRACKERS = ("tensorboard", "wandb", "trackio")
SECONDS_BETWEEN_LINES = 10
"""Where the output is not a terminal, step lines are printed at most this often."""


class StepProgress(Progress):
    """A progress bar with a line of metrics below it, so that both fit into 80 columns."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        for task in self.tasks:
            if task.description:
                yield Text(task.description, no_wrap=True, overflow="ellipsis")


class ProgressPrinter:
    """Print a progress bar on a terminal, lines elsewhere, and nothing on other ranks."""

    def __init__(self, is_main: bool, console: Console | None = None):
        self._is_main = is_main
        self._console = console or Console(highlight=False)
        self._progress: StepProgress | None = None
        self._bar = TaskID(0)
        self._steps = 0
        self._next_line = 0.0
        self._numbers = ""

    def print(self, text: str) -> None:
        if self._is_main:
            # Lines wrap at words on a terminal and stay whole in a pipe or file.
            wrap = self._console.is_terminal
            self._console.print(text, markup=False, soft_wrap=not wrap)

    def start(self, step: int, steps: int) -> None:
        self._steps = steps
        if self._is_main and self._console.is_terminal:
            self._progress = StepProgress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TextColumn("elapsed"),
                TimeElapsedColumn(),
                TextColumn("remaining"),
                TimeRemainingColumn(),
                console=self._console,
                refresh_per_second=4,
            )
            self._bar = self._progress.add_task("", completed=step, total=steps)
            self._progress.start()

    def advance(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._bar, completed=step)

    def show_metrics(self, step: int, values: dict[str, float]) -> None:
        """Show metrics below the bar; elsewhere print a line now and then, and at the last step."""
        self._numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._progress is not None:
            self._progress.update(self._bar, description=self._numbers)
        elif time.monotonic() >= self._next_line or step == self._steps:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            self.print(f"step {step}/{self._steps}  {self._numbers}")

    def show_activity(self, activity: str) -> None:
        """Show what the run does between steps (validating, sampling); "" shows metrics again."""
        if self._progress is not None:
            self._progress.update(self._bar, description=activity or self._numbers, refresh=True)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class Trackers:
    """Forward metrics and samples to TensorBoard, Weights & Biases or Trackio through Accelerate.

    A tracker may fail without affecting the run: its error is printed once and it is disabled. If
    it cannot show samples, it continues to receive metrics.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        folder: Path,
        config: Json,
        warn: Callable[[str], None],
        run_name: str | None = None,
    ):
        self._warn = warn
        self._run_name = run_name
        self._trackers: dict[str, GeneralTracker] = {}
        self._without_samples: set[str] = set()
        for name in names:
            self._call(name, partial(self._open, name, folder, config))

    def _open(self, name: str, folder: Path, config: Json) -> None:
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        needs_folder = tracker_class.requires_logging_directory
        arguments: Json = {"logging_dir": folder} if needs_folder else {}
        if self._run_name is not None and name in ("wandb", "trackio"):
            arguments["name"] = self._run_name
        tracker = tracker_class(folder.name, **arguments)
        tracker.start()
        self._trackers[name] = tracker
        # TensorBoard accepts only plain values: a list or None would disable the whole tracker.
        plain = (bool, int, float, str)
        tracker.store_init_configuration(
            {key: one if isinstance(one, plain) else str(one) for key, one in config.items()}
        )

    def log(self, record: Json) -> None:
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
        if record.get("kind") == "validation" and "examples" in numbers:
            # Trackers draw one curve for each name, and this one is of the training examples.
            numbers["val/examples"] = numbers.pop("examples")
        for name, tracker in list(self._trackers.items()):
            self._call(name, partial(tracker.log, numbers, step=record["step"]))

    def log_samples(self, samples: list[Sample], step: int) -> None:
        for name, tracker in self._trackers.items():
            if name in self._without_samples:
                continue
            try:
                log_samples(name, tracker, samples, step)
            except Exception as error:  # no error of a tracker may end a run
                self._without_samples.add(name)
                self._warn(
                    f"The tracker {name} cannot show samples ({error}) and receives only metrics; "
                    "the samples are in the run directory."
                )

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._call(name, tracker.finish)

    def _call(self, name: str, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:  # no error of a tracker may end a run
            self._trackers.pop(name, None)
            self._warn(
                f"The tracker {name} failed and is disabled ({error}); metrics.jsonl is complete."
            )


class MetricLogger:
    """Write records on the main process; `on_log` receives every record on every process."""

    def __init__(
        self,
        directory: RunDirectory,
        printer: ProgressPrinter,
        dist: Distributed,
        *,
        alarms: tuple[Alarm, ...],
        trackers: Trackers | None,
        on_log: Callable[[Json], None] | None,
    ):
        self._directory, self._printer, self._dist = directory, printer, dist
        self._alarms = AlarmMonitor(alarms)
        self._trackers = [] if trackers is None else [trackers]
        self._own_trackers = trackers
        self._on_log = on_log
        known = directory.read_notes("rejected.jsonl") if dist.is_main else []
        self._known_rejected = {line.get("example") for line in known}
        self._new_rejected: list[tuple[str, str]] = []
        self._disk_full = False

    def log(self, record: Json) -> None:
        """Log a record and the examples that any process could not read."""
        self._note_rejected()
        self.log_on_main(record)

    def log_on_main(self, record: Json) -> None:
        """Log a record without waiting for other processes."""
        if self._dist.is_main:
            written = self._directory.log(record)
            if not written and not self._disk_full:
                self._printer.print(
                    "metrics.jsonl cannot be written (is the disk full?); its lines are kept and "
                    "written with the next record."
                )
            self._disk_full = not written
            for trackers in self._trackers:
                trackers.log(record)
            for message in self._alarms.check(record["step"], record):
                self._directory.note("alarms.jsonl", {"step": record["step"], "alarm": message})
                self._printer.print(f"Step {record['step']}: {message}")
        if self._on_log is not None:
            self._on_log(record)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        """Send samples to the trackers; call it on the main process."""
        for trackers in self._trackers:
            trackers.log_samples(samples, step)

    @contextmanager
    def forwarding_to(self, trackers: Trackers) -> Iterator[None]:
        """Log to more trackers inside a `with` block."""
        self._trackers.append(trackers)
        try:
            yield
        finally:
            self._trackers.remove(trackers)

    def note_skipped_examples(self, batch: Batch | None) -> None:
        """Remember examples that could not be read; they are written with the next record."""
        if batch is not None and batch.rejected:
            self._new_rejected += batch.rejected

    def _note_rejected(self) -> None:
        """Write each unreadable example once per run, whichever process found it."""
        for name, reason in self._dist.all_gather_json(self._new_rejected):
            if self._dist.is_main and name not in self._known_rejected:
                self._known_rejected.add(name)
                self._directory.note("rejected.jsonl", {"example": name, "reason": reason})
                self._printer.print(printable(f"Skipped {name}: {reason}"))
        self._new_rejected = []

    def close(self) -> None:
        if self._own_trackers is not None:
            self._own_trackers.close()


@dataclass
class ThroughputMeter:
    """Measure examples per second and the fraction of time spent waiting for data."""

    device: torch.device
    _start: float = field(default_factory=lambda: time.perf_counter())
    _examples: int = 0
    _wait_seconds: float = 0.0

    def add(self, examples: int, wait_seconds: float) -> None:
        self._examples += examples
        self._wait_seconds += wait_seconds

    def compute(self) -> dict[str, float]:
        """Return the values since the last call."""
        now = time.perf_counter()
        seconds = max(now - self._start, 1e-9)
        values = {
            "examples_per_second": self._examples / seconds,
            "data_wait_frac": min(1.0, self._wait_seconds / seconds),
            "peak_memory_mb": peak_memory_mb(self.device),
        }
        self._start, self._examples, self._wait_seconds = now, 0, 0.0
        return values


def peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS bytes, Linux kilobytes

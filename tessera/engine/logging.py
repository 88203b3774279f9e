"""What a run writes down: metrics.jsonl and its mirrors, and the journals of rejected examples and
of alarms."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tessera.engine.distributed import Distributed
from tessera.engine.guards import Health
from tessera.engine.task import Alarm, Batch
from tessera.run.directory import RunDirectory


class ProgressPrinter:
    def __init__(self, main: bool, console: Console | None = None):
        self._main = main
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._steps = 0
        self._next_line = 0.0

    def say(self, text: str) -> None:
        if self._main:
            self._console.print(text, markup=False)

    def begin(self, done: int, steps: int) -> None:
        self._steps = steps
        if self._main and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                refresh_per_second=4,
            )
            self._bar = self._progress.add_task("", completed=done, total=steps)
            self._progress.start()

    def advance(self, done: int) -> None:
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, completed=done)

    def numbers(self, done: int, values: dict[str, float]) -> None:
        """On a terminal beside the bar; elsewhere a line, at most one every ten seconds, and the
        last."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._progress is not None and self._bar is not None:
            self._progress.update(self._bar, description=text)
        elif time.monotonic() >= self._next_line or done == self._steps:
            self._next_line = time.monotonic() + 10
            self.say(f"step {done}/{self._steps}  {text}")

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


TRACKERS = ("tensorboard", "wandb", "trackio")


class Trackers:
    def __init__(
        self,
        names: tuple[str, ...],
        directory: Path,
        config: dict[str, Any],
        say: Callable[[str], None],
    ):
        self._say = say
        self._trackers: dict[str, GeneralTracker] = {}
        for name in names:
            self._guarded(name, partial(self._open, name, directory, config))

    def _open(self, name: str, directory: Path, config: dict[str, Any]) -> None:
        kind = LOGGER_TYPE_TO_CLASS[name]
        tracker = (
            kind(directory.name, logging_dir=directory)
            if kind.requires_logging_directory
            else kind(directory.name)
        )
        tracker.start()
        self._trackers[name] = tracker
        # TensorBoard takes only plain values: a list or a None in the configuration would cost the
        # whole mirror.
        tracker.store_init_configuration(
            {
                key: value if isinstance(value, (bool, int, float, str)) else str(value)
                for key, value in config.items()
            }
        )

    def log(self, record: dict[str, Any]) -> None:
        values = {
            key: value
            for key, value in record.items()
            if isinstance(value, (int, float)) and key != "step"
        }
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, partial(tracker.log, values, step=record["step"]))

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, tracker.finish)

    def _guarded(self, name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, it is not worth a run
            self._trackers.pop(name, None)
            self._say(
                f"The tracker {name} failed and is left alone from here on ({error}); metrics.jsonl has everything."
            )


class MetricLogger:
    """Only the main process writes; `on_log`, a caller's own ear, hears every record on every
    process."""

    def __init__(
        self,
        directory: RunDirectory,
        report: ProgressPrinter,
        dist: Distributed,
        *,
        alarms: tuple[Alarm, ...],
        trackers: Trackers | None,
        on_log: Callable[[dict[str, Any]], None] | None,
    ):
        self._folder, self._report, self._dist, self._main = directory, report, dist, dist.is_main
        self._health = Health(alarms)
        self._mirrors = trackers
        self._on_log = on_log
        self._rejected = (
            {line["example"] for line in directory.noted("rejected.jsonl")}
            if dist.is_main
            else set()
        )
        self._heard: list[tuple[str, str]] = []
        self._disk_refuses = False

    def write(self, record: dict[str, Any]) -> None:
        self._list_rejected()
        if self._main:
            self._write_line(record)
            if self._mirrors is not None:
                self._mirrors.log(record)
            for message in self._health.listen(record["step"], record):
                self._folder.note("alarms.jsonl", {"step": record["step"], "alarm": message})
                self._report.say(f"Step {record['step']}: {message}")
        if self._on_log is not None:
            self._on_log(record)

    def _write_line(self, record: dict[str, Any]) -> None:
        written = self._folder.log(record)
        if not written and not self._disk_refuses:
            self._report.say(
                "metrics.jsonl cannot be written just now (is the disk full?); its lines are kept and tried again."
            )
        self._disk_refuses = not written

    def note_skipped_examples(self, batch: Batch | None) -> None:
        """Examples of this process that could not be read; they are listed with the next record,
        when processes meet."""
        self._heard += batch.rejected if batch is not None else []

    def _list_rejected(self) -> None:
        """Each unusable example is told once in the life of a run, whichever process met it."""
        for name, reason in self._dist.all_gather_object(self._heard):
            if self._main and name not in self._rejected:
                self._rejected.add(name)
                self._folder.note("rejected.jsonl", {"example": name, "reason": reason})
                self._report.say(f"Left out {name}: {reason}")
        self._heard = []

    def close(self) -> None:
        if self._mirrors is not None:
            self._mirrors.close()


class ThroughputMeter:
    """Examples per second and the share of time spent waiting for data, since it was last asked."""

    def __init__(self, device: torch.device):
        self._device = device
        self._since = time.perf_counter()
        self._examples = 0
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def trained(self, examples: int) -> None:
        self._examples += examples

    def told(self) -> dict[str, float]:
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        numbers = {
            "examples_per_second": self._examples / seconds,
            "data_wait_frac": min(1.0, self._waited / seconds),
            "peak_memory_mb": peak_memory_mb(self._device),
        }
        self._since, self._examples, self._waited = now, 0, 0.0
        return numbers


def peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (
        2**20 if sys.platform == "darwin" else 2**10
    )  # macOS counts bytes, Linux kilobytes

"""Logging: what a terminal and a pipe show, trackers that cannot affect a run, and notes."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from rich.console import Console

from tessera.engine import logging
from tessera.engine.distributed import Distributed
from tessera.engine.logging import (
    TRACKERS,
    MetricLogger,
    ProgressPrinter,
    ThroughputMeter,
    Trackers,
)
from tessera.engine.task import Alarm, Batch
from tessera.modalities.image.recipes import images_vqgan
from tessera.run.config import encode, flatten
from tessera.run.directory import RunDirectory
from tests.engine.small_task import small_engine

Distributed.from_environment()  # Accelerate's trackers need its process state

# ---- the terminal

METRICS = {"model": 0.12345, "discriminator": 2.0123, "examples/s": 1234.5}
LONG_LINE = "validation at step 500: " + "  ".join(f"metric{i} 0.123" for i in range(20))


class FakeTerminal:
    """A terminal of 80 columns that records everything written to it."""

    def __init__(self, is_terminal: bool = True):
        self.file = io.StringIO()
        self.console = Console(
            file=self.file,
            force_terminal=is_terminal,
            width=80,
            height=25,
            highlight=False,
            color_system=None,
            _environ={},
        )

    def lines(self) -> list[str]:
        """Return all lines in the order in which they were written, without control codes."""
        return [
            re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip()
            for line in re.split(r"[\r\n]", self.file.getvalue())
        ]

    def last_bar(self) -> list[str]:
        """Return the lines of the bar that was drawn last."""
        lines = [line for line in self.lines() if line]
        start = max(i for i, line in enumerate(lines) if line.startswith("step "))
        return lines[start:]


def test_the_bar_labels_elapsed_and_remaining_time_in_80_columns():
    terminal = FakeTerminal()
    printer = ProgressPrinter(True, terminal.console)
    printer.start(0, 500_000)
    for step in (249_999, 250_000):
        printer.advance(step)
        time.sleep(0.002)
    printer.show_metrics(250_000, METRICS)
    printer.stop()
    bar, metrics = terminal.last_bar()
    number = r"\d+:\d\d:\d\d"
    assert re.fullmatch(rf"step 250000/500000 \S+ +elapsed {number} remaining {number}", bar)
    assert metrics == "model 0.1235  discriminator 2.012  examples/s 1234"
    assert all(len(line) <= 80 for line in terminal.lines())


def test_the_bar_shows_an_activity_until_it_ends():
    terminal = FakeTerminal()
    printer = ProgressPrinter(True, terminal.console)
    printer.start(0, 1000)
    printer.advance(500)
    printer.show_metrics(500, METRICS)
    printer.show_activity("validating")
    bar, activity = terminal.last_bar()
    assert bar.startswith("step 500/1000 ") and "elapsed" in bar and "remaining" in bar
    assert activity == "validating"
    printer.show_activity("")
    assert terminal.last_bar()[1].startswith("model 0.1235")
    printer.stop()


def test_a_run_shows_validating_and_sampling_while_it_does_so(tmp_path):
    engine = small_engine(tmp_path, steps=4, validate_every=2, sample_every=2, log_every=1)
    terminal = FakeTerminal()
    engine.printer = ProgressPrinter(True, terminal.console)
    engine.logger._printer = engine.printer
    eval_step, sample = engine.task.eval_step, engine.task.sample
    shown: list[tuple[int, str]] = []

    def record_eval_step(batch: Batch) -> Any:
        shown.append((engine.global_step, terminal.last_bar()[1]))
        return eval_step(batch)

    def record_sample(batch: Batch) -> Any:
        shown.append((engine.global_step, terminal.last_bar()[1]))
        return sample(batch)

    engine.task.eval_step, engine.task.sample = record_eval_step, record_sample
    engine.run()
    expected = [(step, name) for step in (2, 4) for name in ("validating", "sampling")]
    assert sorted(set(shown), key=shown.index) == expected
    assert terminal.last_bar()[1].startswith("model "), "the metrics are shown again"


def test_long_lines_wrap_at_words_on_a_terminal():
    terminal = FakeTerminal()
    printer = ProgressPrinter(True, terminal.console)
    printer.start(0, 1000)
    printer.print(LONG_LINE)
    printed = [line for line in terminal.lines() if line and not line.startswith("step ")]
    assert len(printed) > 3 and all(len(line) <= 80 for line in printed)
    assert [word for line in printed for word in line.split()] == LONG_LINE.split()
    printer.stop()


def test_lines_stay_whole_outside_a_terminal():
    terminal = FakeTerminal(is_terminal=False)
    printer = ProgressPrinter(True, terminal.console)
    printer.start(0, 1000)
    printer.print(LONG_LINE)
    printer.show_activity("validating")
    printer.stop()
    assert terminal.file.getvalue() == LONG_LINE + "\n"


def test_outside_a_terminal_steps_are_printed_now_and_then(monkeypatch):
    terminal = FakeTerminal(is_terminal=False)
    printer = ProgressPrinter(True, terminal.console)
    printer.start(0, 100)
    for step, now in ((1, 100.0), (2, 109.0), (3, 111.0), (4, 112.0), (100, 113.0)):
        monkeypatch.setattr(logging.time, "monotonic", lambda now=now: now)
        printer.show_metrics(step, {"model": 0.5})
    assert terminal.file.getvalue().splitlines() == [
        "step 1/100  model 0.5",
        "step 3/100  model 0.5",
        "step 100/100  model 0.5",
    ]


def test_only_the_main_process_prints():
    terminal = FakeTerminal()
    printer = ProgressPrinter(False, terminal.console)
    printer.start(0, 10)
    printer.print("text")
    printer.advance(5)
    printer.show_metrics(10, {"model": 0.5})
    printer.show_activity("validating")
    printer.stop()
    assert terminal.file.getvalue() == ""


def test_square_brackets_in_file_names_are_printed_unchanged():
    terminal = FakeTerminal()
    ProgressPrinter(True, terminal.console).print("Skipped photo[1].png: [red] empty")
    assert terminal.file.getvalue() == "Skipped photo[1].png: [red] empty\n"


# ---- throughput


def test_throughput_is_measured_since_the_last_call(monkeypatch):
    now = 0.0
    monkeypatch.setattr(logging.time, "perf_counter", lambda: now)
    meter = ThroughputMeter(torch.device("cpu"))
    for _ in range(5):
        meter.add(16, wait_seconds=0.1)
    now = 2.0
    values = meter.compute()
    assert values["examples_per_second"] == pytest.approx(40.0)
    assert values["data_wait_frac"] == pytest.approx(0.25)
    assert values["peak_memory_mb"] > 10
    meter.add(10, wait_seconds=0.0)
    now = 3.0
    values = meter.compute()
    assert values["examples_per_second"] == pytest.approx(10.0) and values["data_wait_frac"] == 0


# ---- metrics, skipped examples and alarms


def make_logger(path: Path, **options: Any) -> tuple[MetricLogger, FakeTerminal]:
    directory, terminal = RunDirectory(path), FakeTerminal(is_terminal=False)
    directory.create()
    arguments: dict[str, Any] = {"alarms": (), "trackers": None, "on_log": None} | options
    printer = ProgressPrinter(True, terminal.console)
    return MetricLogger(directory, printer, Distributed(), **arguments), terminal


def test_a_record_reaches_the_file_and_the_callback(tmp_path):
    received: list[dict[str, Any]] = []
    logger, _ = make_logger(tmp_path, on_log=received.append)
    record = {"step": 1, "kind": "train", "model/loss": 0.5}
    logger.log(record)
    assert RunDirectory(tmp_path).read_records() == received == [record]


def test_an_unreadable_example_is_noted_once_per_run(tmp_path):
    batch = Batch(torch.zeros(0), [], [], rejected=[("a.png", "empty"), ("b.png", "no image")])
    printed = []
    for _ in range(2):  # the second time in a resumed run
        logger, terminal = make_logger(tmp_path)
        for step in (1, 2):
            logger.note_skipped_examples(batch)
            logger.note_skipped_examples(None)
            logger.log({"step": step, "kind": "train"})
        printed.append(terminal.file.getvalue())
    assert printed == ["Skipped a.png: empty\nSkipped b.png: no image\n", ""]
    assert RunDirectory(tmp_path).read_notes("rejected.jsonl") == [
        {"example": "a.png", "reason": "empty"},
        {"example": "b.png", "reason": "no image"},
    ]


def test_an_alarm_is_printed_and_noted_with_its_step(tmp_path):
    alarm = Alarm(name="flat", metric="model/loss", above=1.0, patience=1, hint="Lower the lr.")
    logger, terminal = make_logger(tmp_path, alarms=(alarm,))
    for step, loss in ((1, 0.5), (2, 3.0)):
        logger.log({"step": step, "kind": "train", "model/loss": loss})
    (note,) = RunDirectory(tmp_path).read_notes("alarms.jsonl")
    assert note["step"] == 2 and note["alarm"].startswith("flat: model/loss is 3, above 1.0")
    assert terminal.file.getvalue() == f"Step 2: {note['alarm']}\n"


# ---- trackers


class RecordingTracker(GeneralTracker):
    """A tracker that records its calls and fails in the method named by `fails_in`."""

    name = "recording"
    requires_logging_directory = False
    fails_in = ""
    last: RecordingTracker

    def __init__(self, run_name: str):
        super().__init__()
        self.run_name = run_name
        self.calls: list[Any] = []
        type(self).last = self

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def record(self, method: str, *arguments: Any) -> None:
        if method == self.fails_in:
            raise ConnectionError("connection lost")
        self.calls.append((method, *arguments))

    def start(self) -> None:
        self.record("start")

    def store_init_configuration(self, values: dict) -> None:
        self.record("config", values)

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        self.record("log", step, values)

    def finish(self) -> None:
        self.record("finish")


@pytest.fixture
def tracker_class(monkeypatch: pytest.MonkeyPatch) -> type[RecordingTracker]:
    """A tracker class of this test alone, in place of TensorBoard's."""
    new_class = type("OneTracker", (RecordingTracker,), {})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", new_class)
    return new_class


def test_a_tracker_receives_the_settings_and_every_number(tracker_class, tmp_path):
    warnings: list[str] = []
    trackers = Trackers(("tensorboard",), tmp_path / "my-run", {"engine.steps": 3}, warnings.append)
    trackers.log(
        {"step": 1, "kind": "train", "model/loss": 0.5, "model/empty": None, "skipped_steps": 0}
    )
    trackers.log({"step": 2, "kind": "validation", "examples": 3, "val_ema/psnr": 20.0})
    trackers.close()
    assert tracker_class.last.run_name == "my-run"
    assert tracker_class.last.calls == [
        ("start",),
        ("config", {"engine.steps": 3}),
        ("log", 1, {"model/loss": 0.5, "skipped_steps": 0}),
        ("log", 2, {"val_ema/psnr": 20.0, "val/examples": 3}),
        ("finish",),
    ]
    assert not warnings


@pytest.mark.parametrize("method", ["start", "config", "log", "finish"])
def test_a_tracker_that_fails_is_reported_once_and_disabled(method, tracker_class, tmp_path):
    tracker_class.fails_in = method
    warnings: list[str] = []
    trackers = Trackers(("tensorboard",), tmp_path, {}, warnings.append)
    for step in (1, 2, 3):
        trackers.log({"step": step, "model/loss": 0.5})
    trackers.close()
    assert len(warnings) == 1
    assert (
        "tensorboard" in warnings[0]
        and "connection lost" in warnings[0]
        and "metrics.jsonl is complete" in warnings[0]
    )


def test_a_missing_tracker_is_reported_and_others_work(tracker_class, tmp_path, monkeypatch):
    def missing(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'wandb'")

    missing.requires_logging_directory = False  # type: ignore[attr-defined]
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", missing)
    warnings: list[str] = []
    trackers = Trackers(("wandb", "tensorboard"), tmp_path, {}, warnings.append)
    trackers.log({"step": 1, "model/loss": 0.5})
    trackers.close()
    assert ("log", 1, {"model/loss": 0.5}) in tracker_class.last.calls
    assert len(warnings) == 1 and "No module named 'wandb'" in warnings[0]


def test_accelerate_has_every_tracker_of_the_configuration():
    for name in TRACKERS:
        assert issubclass(LOGGER_TYPE_TO_CLASS[name], GeneralTracker)


def test_tensorboard_accepts_the_settings_and_metrics_of_a_run(tmp_path):
    """The settings of a real recipe include None and lists."""
    warnings: list[str] = []
    config = flatten(encode(images_vqgan(preset="tiny")))
    trackers = Trackers(("tensorboard",), tmp_path / "run", config, warnings.append)
    trackers.log({"step": 1, "kind": "train", "model/loss": 0.5})
    trackers.close()
    assert not warnings
    files: list[Path] = list(tmp_path.rglob("events.out.tfevents.*"))
    assert any(b"model/loss" in file.read_bytes() for file in files)
    assert any(b"task.model.dim" in file.read_bytes() for file in files)

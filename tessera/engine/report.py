"""What a person sees of a run at work: a progress bar on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Report:
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
        """On a terminal beside the bar; elsewhere a line, at most one every ten seconds, and the last."""
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

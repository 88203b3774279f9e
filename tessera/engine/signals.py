"""SIGTERM and Ctrl-C as a question the engine asks between two pieces of work, instead of an
accident in the middle.

The first signal asks the run to stop; it saves and ends with 128 + the signal's number. A second
Ctrl-C means now.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """A signal asked this run to stop. Everything done so far can be saved."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


class Signals:
    """Within this context, `received` is the number of the first signal that came, or 0."""

    WATCHED = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self.received = 0
        if (
            threading.current_thread() is threading.main_thread()
        ):  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._heard) for number in self.WATCHED}
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # a run that was dropped half-way may be tidied away by any thread
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number

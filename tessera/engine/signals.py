"""SIGTERM and SIGINT as a flag that the engine checks between two pieces of work.

The first signal requests a stop: the run saves a checkpoint and exits with 128 + the number of the
signal. A second Ctrl-C raises KeyboardInterrupt at once; SIGINTs that follow each other within
seconds are one Ctrl-C, which several processes and their launcher pass on to each other.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import ClassVar

Handler = Callable[[int, FrameType | None], object] | int | None
"""What `signal.signal` accepts and returns."""


SAME_SECONDS = 2.0
"""SIGINTs within this time of the first are the same Ctrl-C."""


class Interrupted(Exception):
    """A signal requested the run to stop; everything done so far can be saved."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


@dataclass
class Signals:
    """Within this context, `received` is the number of the first signal received, or 0."""

    WATCHED: ClassVar = (signal.SIGTERM, signal.SIGINT)

    received: int = 0
    _first_time: float = 0.0
    _previous: dict[int, Handler] = field(default_factory=dict)

    def __enter__(self) -> Signals:
        self.received = 0
        # Python allows signal handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._receive) for number in self.WATCHED
            }
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # an abandoned run may be finalised by any thread
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._first_time = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self._first_time + SAME_SECONDS:
            raise KeyboardInterrupt

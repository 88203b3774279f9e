"""What every reader of clips gives, whatever the file: facts about the whole, and frames with their
times.

Times are seconds, from 0 on. `film.py`, `animation.py` and `frame_folder.py` hold a reader each;
`video_files.py` picks one and asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import PIL.Image

CLOCK_HZ = 24.0
"""The rate of what has no clock of its own: a folder of frames, a still picture."""
THUMBNAIL = 64  # the short side of frames that are only looked at to see whether they can be


@dataclass(frozen=True)
class Facts:
    """What a file says of itself, upright."""

    seconds: float
    """as far as there is data"""
    claimed_seconds: float
    """as long as it is meant to be; more than that for a file that was cut short"""
    rate_hz: float
    """frames a second, on average"""
    width: int
    height: int
    codec: str
    """h264, vp9, ...; GIF, WEBP, PNG for animations; "frames" for a folder; "still" for a
    picture"""

    @property
    def frames(self) -> int:
        """at that rate"""
        return max(1, round(self.seconds * self.rate_hz))

    @property
    def still(self) -> bool:
        return self.codec == "still"


@dataclass(frozen=True)
class Frame:
    begins: float
    ends: float
    """seconds"""
    pixels: Callable[[], np.ndarray]
    """(H, W, 3) uint8, converted when asked for"""


Frames = Generator[Frame, None, None]


class Reader(Protocol):
    def facts(self) -> Facts: ...

    def frames(self, since: float, shortest: int | None) -> Frames:
        """In order, from the one that is on the screen at `since`, or some before it. Raises
        Unreadable where it breaks."""


def reduction(width: int, height: int, shortest: int | None) -> int:
    """By which whole number a frame may be divided."""
    return max(1, min(width, height) // shortest) if shortest else 1


def reduced(picture: PIL.Image.Image, shortest: int | None) -> np.ndarray:
    return np.asarray(picture.reduce(reduction(*picture.size, shortest)))

"""The interface of video readers: information about a file, and its frames with their times.

Times are in seconds from the start. `av_reader.py`, `animation.py` and `frame_folder.py` contain
one reader each; `files.py` selects the reader of a path.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import PIL.Image

from tessera._optional import require

DEFAULT_RATE_HZ = 24.0
"""The frame rate of inputs without one: folders of frames and still images."""
THUMBNAIL = 64
"""The short side of frames that are decoded only to test whether they can be."""


@dataclass(frozen=True)
class VideoInfo:
    """Properties of a video file, with its rotation applied."""

    seconds: float
    """The duration of the data in the file."""
    declared_seconds: float
    """The duration that the file declares, which is longer than `seconds` if it is truncated."""
    rate_hz: float
    """The average number of frames per second."""
    width: int
    height: int
    codec: str
    """For example h264 or vp9; GIF, WEBP or PNG for animations; "frames" for a folder of frames;
    "still" for a still image."""

    @property
    def frames(self) -> int:
        """The number of frames at the average rate."""
        return max(1, round(self.seconds * self.rate_hz))

    @property
    def still(self) -> bool:
        """Whether the file is a still image."""
        return self.codec == "still"


@dataclass(frozen=True)
class Frame:
    """One frame of a video."""

    start: float
    """When the frame is first displayed, in seconds."""
    end: float
    """When the frame is no longer displayed, in seconds."""
    pixels: Callable[[], np.ndarray]
    """Convert the frame to uint8 of shape (H, W, 3)."""


Frames = Generator[Frame, None, None]


class FrameReader(Protocol):
    """A reader of one kind of files."""

    def read_info(self) -> VideoInfo:
        """Return the properties of the file, or raise UnreadableFile."""

    def frames(self, since: float, min_side: int | None) -> Frames:
        """Yield the frames in order, beginning at or before the one displayed at `since`.

        Raises:
            UnreadableFile: At the first frame that cannot be decoded.
        """


def import_av() -> ModuleType:
    """Import PyAV, or raise ModuleNotFoundError with the command that installs it."""
    return require("av", extra="video", purpose="Reading and writing videos")


def downscale_factor(width: int, height: int, min_side: int | None) -> int:
    """Return the largest integer factor that keeps the short side at least `min_side`."""
    return max(1, min(width, height) // min_side) if min_side else 1


def downscale(image: PIL.Image.Image, min_side: int | None) -> np.ndarray:
    """Reduce an image by an integer factor and return its pixels."""
    return np.asarray(image.reduce(downscale_factor(*image.size, min_side)))

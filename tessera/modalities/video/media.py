"""Clips: films, animations and folders of frames in, (T, H, W, 3) bytes in the middle, MP4 and GIF
out. T counts frames.

Models see a clip as float32 of shape (3, T, H, W) in [-1, 1]; what the values mean,
`modalities/image/media.py` knows. How files are read, `modalities/video/io/files.py` knows, and how
they are written, `modalities/video/io/writer.py`. What is transparent is laid on white.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tessera.modalities.image.media import Image
from tessera.modalities.video.io.files import probe, read_frames
from tessera.modalities.video.io.writer import write_gif, write_mp4

if TYPE_CHECKING:  # listing, checking and drawing clips needs no torch
    import torch


@dataclass
class VideoExample:
    clip: np.ndarray
    """(3, T, S, S) float32 in [-1, 1]"""
    length: int
    """how many frames are real; 1 for a picture"""
    rate_hz: float
    """how many frames a second, to show it as it was"""
    caption: str
    """"" where nothing is said about the clip"""


@dataclass
class VideoBatch:
    clips: torch.Tensor
    """(B, 3, T, S, S) float32 in [-1, 1]"""
    lengths: torch.Tensor
    """(B,) int64: how many frames of each clip are real"""
    rates_hz: list[float]
    captions: list[str]

    def to(self, device: torch.device | str) -> VideoBatch:
        return replace(self, clips=self.clips.to(device), lengths=self.lengths.to(device))


def collate(examples: Sequence[VideoExample]) -> VideoBatch:
    import torch

    clips = torch.from_numpy(np.stack([example.clip for example in examples]))
    lengths = torch.tensor([example.length for example in examples])
    return VideoBatch(
        clips,
        lengths,
        [example.rate_hz for example in examples],
        [example.caption for example in examples],
    )


@dataclass(eq=False)
class Video:
    frames: np.ndarray
    """(T, H, W, 3) uint8"""
    rate_hz: float

    def __post_init__(self) -> None:
        if (
            self.frames.dtype != np.uint8
            or self.frames.ndim != 4
            or self.frames.shape[3] != 3
            or not len(self.frames)
        ):
            raise ValueError(
                f"a Video holds (frames, height, width, 3) bytes, but was given {self.frames.shape} of "
                f"{self.frames.dtype}; for (3, frames, height, width) floats in [-1, 1] use Video.from_floats"
            )
        if not 0 < self.rate_hz < math.inf:
            raise ValueError(f"a Video shows some frames a second, but its rate is {self.rate_hz}")

    @classmethod
    def load(cls, path: str | Path) -> Video:
        """All of a file that can be read, at its average rate. Raises Unreadable with the file and
        the reason."""
        facts = probe(path)
        return read_clip(path, 0.0, facts.frames, facts.rate_hz)

    def save(self, stem: str | Path) -> Path:
        """An MP4, and beside it a GIF, which shows everywhere; gives back the MP4."""
        path = Path(f"{stem}.mp4")  # not with_suffix, which would eat the end of "epoch-0.5"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mp4(self, path)
        write_gif(self, Path(f"{stem}.gif"))
        return path

    @classmethod
    def sheet(cls, items: Sequence[Video], columns: int | None = None) -> Video:
        """A contact sheet that moves, as long as the longest of its clips; the others stay on their
        last frame."""
        if not items:
            raise ValueError("a sheet of no clips was asked for: give at least one")
        return cls.together(items, lambda pictures: Image.sheet(pictures, columns))

    @classmethod
    def beside(cls, left: Video, right: Video) -> Video:
        """Two clips with a thin gap between them: an original and its reconstruction."""
        return cls.together([left, right], lambda pictures: Image.beside(*pictures))

    @classmethod
    def together(cls, items: Sequence[Video], lay_out: Callable[[list[Image]], Image]) -> Video:
        """Several clips at the same time, each at its own speed."""
        rate = max(item.rate_hz for item in items)
        count = max(round(len(item.frames) * rate / item.rate_hz) for item in items)
        pages = [lay_out([item.at(moment / rate) for item in items]) for moment in range(count)]
        return cls(np.stack([page.pixels for page in pages]), rate)

    def at(self, seconds: float) -> Image:
        """What is on the screen; after the end, the last frame."""
        number = int(seconds * self.rate_hz + 0.01)  # 0.01 of a frame, for rounding
        return Image(self.frames[min(number, len(self.frames) - 1)])

    def floats(self) -> np.ndarray:
        """(3, T, H, W) float32 in [-1, 1]: what models see."""
        count, height, width, _ = self.frames.shape
        column = Image(
            self.frames.reshape(count * height, width, 3)
        )  # the frames below each other are one tall picture
        return column.floats().reshape(3, count, height, width)

    @classmethod
    def from_floats(cls, array: np.ndarray, rate_hz: float) -> Video:
        """The nearest bytes, as Image.from_floats finds them."""
        array = np.asarray(array)
        if array.ndim != 4 or array.shape[0] != 3:
            raise ValueError(
                f"a clip of floats has the shape (3, frames, height, width), but this one is {array.shape}"
            )
        _, count, height, width = array.shape
        column = Image.from_floats(array.reshape(3, count * height, width))
        return cls(column.pixels.reshape(count, height, width, 3), rate_hz)


def read_clip(
    path: str | Path, start_seconds: float, count: int, rate_hz: float, shortest: int | None = None
) -> Video:
    """The part of a file that begins at start, at that rate: `count` frames, or fewer; `shortest`
    as in `read_frames`."""
    return Video(read_frames(path, start_seconds, count, rate_hz, shortest), rate_hz)

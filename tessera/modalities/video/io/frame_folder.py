"""Read a folder with one image file per frame, in the order of the numbers in their names.

A folder is read as a video only where this is explicitly requested.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import PIL.Image

from tessera.data.budget import read_file
from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import SUFFIXES, decode, to_rgb
from tessera.modalities.video.io.base import DEFAULT_RATE_HZ, Frame, Frames, VideoInfo, downscale


@dataclass(frozen=True)
class FrameFolder:
    """A `FrameReader` of a folder of images, at DEFAULT_RATE_HZ."""

    path: str

    def read_info(self) -> VideoInfo:
        files = self.files()
        width, height = self.open_frame(files[0]).size
        seconds = len(files) / DEFAULT_RATE_HZ
        return VideoInfo(seconds, seconds, DEFAULT_RATE_HZ, width, height, "frames")

    def frames(self, since: float, min_side: int | None) -> Frames:
        for number, file in enumerate(self.files()):
            start, end = number / DEFAULT_RATE_HZ, (number + 1) / DEFAULT_RATE_HZ
            if end > since:
                yield Frame(start, end, partial(self.read_pixels, file, min_side))

    def files(self) -> list[Path]:
        """Return the visible image files in natural order."""
        found = [file for file in Path(self.path).iterdir() if file.name.lower().endswith(SUFFIXES)]
        files = [file for file in found if not file.name.startswith(".")]
        if not files:
            raise UnreadableFile(
                f"the folder contains no frames (files ending in {', '.join(SUFFIXES)})"
            )
        return sorted(files, key=lambda file: natural_sort_key(file.name))

    def read_pixels(self, file: Path, min_side: int | None) -> np.ndarray:
        """Decode one frame, reduced as in `downscale`."""
        return downscale(self.open_frame(file), min_side)

    def open_frame(self, file: Path) -> PIL.Image.Image:
        """Decode one frame."""
        try:
            return to_rgb(decode(read_file(file)))
        except UnreadableFile as error:
            raise UnreadableFile(f"frame {file.name}: {error}") from error


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "frame 9" before "frame 10"."""
    return [
        (int(part), "") if part.isdigit() else (0, part)
        for part in re.split(r"(\d+)", name.lower())
    ]

"""A folder that holds a picture per frame, in the order of the numbers in their names, as a clip.

Whoever makes a reader of a folder asks for it to be one clip; nothing takes a folder of pictures
for a clip by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import PIL.Image

from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import ENDINGS, decode, flatten
from tessera.modalities.video.io.base import CLOCK_HZ, Facts, Frame, Frames, reduced


@dataclass(frozen=True)
class FrameFolder:
    path: str

    def facts(self) -> Facts:
        files = self.files()
        width, height = self.picture(files[0]).size
        seconds = len(files) / CLOCK_HZ
        return Facts(seconds, seconds, CLOCK_HZ, width, height, "frames")

    def frames(self, since: float, shortest: int | None) -> Frames:
        for number, file in enumerate(self.files()):
            if (number + 1) / CLOCK_HZ > since:
                yield Frame(
                    number / CLOCK_HZ, (number + 1) / CLOCK_HZ, partial(self.pixels, file, shortest)
                )

    def files(self) -> list[Path]:
        found = [file for file in Path(self.path).iterdir() if file.name.lower().endswith(ENDINGS)]
        files = [file for file in found if not file.name.startswith(".")]
        if not files:
            raise UnreadableFile(
                f"the folder holds no frames (files ending in {', '.join(ENDINGS)})"
            )
        return sorted(files, key=lambda file: by_number(file.name))

    def pixels(self, file: Path, shortest: int | None) -> np.ndarray:
        return reduced(self.picture(file), shortest)

    def picture(self, file: Path) -> PIL.Image.Image:
        try:
            return flatten(decode(file.read_bytes()))
        except UnreadableFile as error:
            raise UnreadableFile(f"the frame {file.name}: {error}") from error


def by_number(name: str) -> list[tuple[int, str]]:
    """A name's place among others: "frame 9" stands before "frame 10"."""
    return [
        (int(part), "") if part.isdigit() else (0, part)
        for part in re.split(r"(\d+)", name.lower())
    ]

"""What is in a folder of pictures, what is unusable and why: every file is decoded once, as
training would.

`check(path)` gives a Report; its `lines()` are for people, `as_json()` is for programs. Imports no
torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tessera.data.captions import Captions
from tessera.data.discovery import find
from tessera.data.errors import UnreadableFile
from tessera.data.inspect import (
    FileReport,
    Progress,
    Report,
    count,
    megabytes,
    scan_folder,
    tallied,
    told_of_all,
    unmatched,
)
from tessera.modalities.image.media import ENDINGS, decode, flatten


@dataclass(frozen=True, kw_only=True)
class ImageFileReport(FileReport):
    mode: str = ""


@dataclass(frozen=True, kw_only=True)
class ImageReport(Report):
    pictures: int
    modes: dict[str, int]
    """colours as stored: RGB, L (grey), P (palette), RGBA, ..."""
    captions_without_picture: list[str]

    def lines(self) -> list[str]:
        return [
            f"{self.path}: {count(self.pictures, 'picture')}, {self.usable:,} usable, {megabytes(self.bytes)}",
            *self.size_lines(),
            *self.common_lines(),
            *tallied("colours", self.modes),
            *self.caption_lines("picture"),
            *unmatched("pictures", self.captions_without_picture),
            *self.duplicate_lines("picture"),
            *self.other_lines(),
            *self.unusable_lines("picture"),
        ]

    def common_lines(self) -> Iterator[str]:
        if self.sizes is not None and len(self.sizes.common) > 1:
            yield "common sizes: " + ", ".join(
                f"{width} x {height} ({n:,})" for width, height, n in self.sizes.common
            )


def check(
    path: str | Path, *, num_workers: int | None = None, progress: Progress | None = None
) -> ImageReport:
    """Looks at every picture; `progress` is told how many of how many are done. No picture at all
    is Refused."""
    looked = scan_folder(find(path, ENDINGS, "pictures"), inspect_file, num_workers, progress)
    return ImageReport(
        **told_of_all(path, looked),
        pictures=len(looked.looks),
        modes=dict(Counter(look.mode for look in looked.usable).most_common()),
        captions_without_picture=list(looked.captions.unmatched),
    )


def inspect_file(root: Path, name: str, captions: Captions) -> ImageFileReport:
    try:
        data = (root / name).read_bytes()
    except OSError as error:
        return ImageFileReport(
            name=name, reason=f"the file cannot be opened ({error.strerror or error})"
        )
    try:
        picture = decode(data)
        flatten(picture)
        caption = captions.of(name)
    except UnreadableFile as error:
        return ImageFileReport(name=name, bytes=len(data), reason=str(error))
    return ImageFileReport(
        name=name,
        bytes=len(data),
        digest=hashlib.blake2b(data, digest_size=16).hexdigest(),
        width=picture.width,
        height=picture.height,
        caption=caption,
        mode=picture.mode,
    )

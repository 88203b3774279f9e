"""What is in a folder of pictures, what is unusable and why: every file is decoded once, as training would.

`check(path)` gives a Report; `Report.lines()` is for people, `Report.as_json()` for programs. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low

from tessera.data.captions import Captions, read_captions
from tessera.data.folders import Found, find, tally
from tessera.folder import Refused
from tessera.media.errors import Unreadable
from tessera.media.image import ENDINGS, decode, flatten

SHOWN = 10  # how many of a long list a person is shown; the JSON has them all
AT_ONCE = 256  # how many files are handed to the threads at a time, so that a million of them need no memory


@dataclass(frozen=True)
class Look:
    """What one file turned out to be."""

    name: str
    bytes: int = 0
    digest: str = ""
    mode: str = ""
    width: int = 0
    height: int = 0
    caption: str = ""
    reason: str = ""
    """why it cannot be used; "" for a picture that can"""


@dataclass(frozen=True)
class Sizes:
    smallest: tuple[int, int]
    """width and height of the picture with the shortest short side"""
    largest: tuple[int, int]
    median_short_side: int
    common: list[tuple[int, int, int]]
    """width, height, and how many pictures have them"""


@dataclass(frozen=True)
class Report:
    path: str
    pictures: int
    usable: int
    bytes: int
    sizes: Sizes | None
    """None where no picture is usable"""
    modes: dict[str, int]
    """colours as stored: RGB, L (grey), P (palette), RGBA, ..."""
    captioned: int
    """usable pictures about which something is said"""
    captions: dict[str, int]
    """where captions stand"""
    captions_refused: str
    """why the captions as a whole cannot be used; "" if they can"""
    captions_without_picture: list[str]
    duplicates: list[list[str]]
    """groups of files that are the same byte for byte"""
    unusable: list[dict[str, str]]
    """name and reason"""
    other_files: str
    """what else lies there, neither picture nor caption"""

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def lines(self) -> list[str]:
        return [
            f"{self.path}: {count(self.pictures, 'picture')}, {self.usable:,} usable, {megabytes(self.bytes)}",
            *self.size_lines(),
            *self.caption_lines(),
            *self.duplicate_lines(),
            *([f"other files: {self.other_files}"] if self.other_files else []),
            *self.unusable_lines(),
        ]

    def size_lines(self) -> Iterator[str]:
        if self.sizes is None:
            return
        smallest, largest = (f"{width} x {height}" for width, height in (self.sizes.smallest, self.sizes.largest))
        span = f"all {smallest}" if len(self.sizes.common) == 1 else f"{smallest} to {largest}"
        yield f"sizes: {span}; median short side {self.sizes.median_short_side}"
        if len(self.sizes.common) > 1:
            yield "common sizes: " + ", ".join(f"{width} x {height} ({n:,})" for width, height, n in self.sizes.common)
        yield "colours: " + ", ".join(f"{mode} ({n:,})" for mode, n in self.modes.items())

    def caption_lines(self) -> Iterator[str]:
        if self.captions_refused:
            yield f"captions: unusable. {self.captions_refused}"
        elif self.captions:
            where = ", ".join(f"{n:,} in {place}" for place, n in self.captions.items())
            yield f"captions: {self.captioned:,} of {count(self.usable, 'usable picture')} ({where})"
        else:
            yield "captions: none"
        if strangers := self.captions_without_picture:
            yield f"captions for pictures that are not there: {some(strangers)}"

    def duplicate_lines(self) -> Iterator[str]:
        if not self.duplicates:
            return
        copies = sum(len(group) - 1 for group in self.duplicates)
        verb = "is a copy of another" if copies == 1 else "are copies of others"
        yield f"duplicates: {count(copies, 'picture')} {verb}; one may be learnt from and the other held out"
        yield from indented([" = ".join(group) for group in self.duplicates])

    def unusable_lines(self) -> Iterator[str]:
        if self.unusable:
            yield f"unusable: {count(len(self.unusable), 'picture')}, left out when a run meets them"
            yield from indented([f"{each['name']}: {each['reason']}" for each in self.unusable])


def check(path: str | Path, *, workers: int | None = None, progress: Callable[[int, int], None] | None = None) -> Report:
    """Looks at every picture; `progress` is told how many of how many are done. No picture at all is Refused."""
    found = find(path, ENDINGS, "pictures")
    captions, refusal = captions_or_why_not(found)
    looks = look_at_all(found, captions, workers or os.cpu_count() or 1, progress)
    usable = [look for look in looks if not look.reason]
    return Report(
        path=str(path),
        pictures=len(looks),
        usable=len(usable),
        bytes=sum(look.bytes for look in looks),
        sizes=sizes_of(usable),
        modes=dict(Counter(look.mode for look in usable).most_common()),
        captioned=sum(bool(look.caption) for look in usable),
        captions=captions.counts(found.names),
        captions_refused=refusal,
        captions_without_picture=list(captions.strangers),
        duplicates=duplicates_of(usable),
        unusable=[{"name": look.name, "reason": look.reason} for look in looks if look.reason],
        other_files=tally(captions.unrelated(found.names, found.beside)),
    )


def captions_or_why_not(found: Found) -> tuple[Captions, str]:
    try:
        return read_captions(found.root, found.names, found.beside), ""
    except Refused as error:
        return Captions(found.root, frozenset(), {}, by_folder=False), str(error)


def look_at_all(found: Found, captions: Captions, workers: int, progress: Callable[[int, int], None] | None) -> list[Look]:
    """Threads, not processes: Pillow decodes and hashlib hashes outside the interpreter's lock."""
    looks: list[Look] = []
    with ThreadPoolExecutor(workers) as threads:
        for start in range(0, len(found.names), AT_ONCE):
            names = found.names[start : start + AT_ONCE]
            for look in threads.map(lambda name: look_at(found.root, name, captions), names):
                looks.append(look)
                if progress is not None:
                    progress(len(looks), len(found.names))
    return looks


def look_at(root: Path, name: str, captions: Captions) -> Look:
    try:
        data = (root / name).read_bytes()
    except OSError as error:
        return Look(name, reason=f"the file cannot be opened ({error.strerror or error})")
    try:
        picture = decode(data)
        flatten(picture)
        caption = captions.of(name)
    except Unreadable as error:
        return Look(name, len(data), reason=str(error))
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return Look(name, len(data), digest, picture.mode, picture.width, picture.height, caption)


def sizes_of(looks: Sequence[Look]) -> Sizes | None:
    if not looks:
        return None
    sizes = [(look.width, look.height) for look in looks]
    return Sizes(
        smallest=min(sizes, key=lambda size: (min(size), max(size))),
        largest=max(sizes, key=lambda size: (min(size), max(size))),
        median_short_side=median_low(min(size) for size in sizes),
        common=[(*size, n) for size, n in Counter(sizes).most_common(5)],
    )


def duplicates_of(looks: Sequence[Look]) -> list[list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for look in looks:
        groups[look.digest].append(look.name)
    return [names for names in groups.values() if len(names) > 1]


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def indented(entries: Sequence[str]) -> Iterator[str]:
    yield from (f"  {entry}" for entry in entries[:SHOWN])
    if len(entries) > SHOWN:
        yield f"  and {len(entries) - SHOWN:,} more"

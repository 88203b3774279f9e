"""What a check of a folder finds and how it is told, whatever the medium; `check_images.py` and
`check_videos.py` add theirs.

Every file is looked at once, as training would, and gives a Look; a Report is what they come to.
Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any, Generic, TypeVar

from tessera.data.captions import Captions, read_captions
from tessera.data.discovery import Found, count_by_suffix
from tessera.run.directory import UserError

SHOWN = 10  # how many of a long list a person is shown; the JSON has them all
AT_ONCE = 256  # how many files are handed to the threads at a time, so that a million of them need no memory

Progress = Callable[[int, int], None]
"""is told how many of how many files are done"""


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """What one file turned out to be."""

    name: str
    bytes: int = 0
    digest: str = ""
    width: int = 0
    height: int = 0
    caption: str = ""
    reason: str = ""
    """why it cannot be used; "" for a file that can"""


AnyLook = TypeVar("AnyLook", bound=FileReport)


@dataclass(frozen=True)
class FolderScan(Generic[AnyLook]):
    """A folder of which every file was looked at."""

    found: Found
    captions: Captions
    refusal: str
    """why the captions as a whole cannot be used; "" if they can"""
    looks: list[AnyLook]

    @property
    def usable(self) -> list[AnyLook]:
        return [look for look in self.looks if not look.reason]


def scan_folder(
    found: Found,
    inspect_file: Callable[[Path, str, Captions], AnyLook],
    num_workers: int | None,
    progress: Progress | None,
) -> FolderScan[AnyLook]:
    """Threads, not processes: decoders and hashlib work outside the interpreter's lock."""
    captions, refusal = captions_or_why_not(found)
    looks: list[AnyLook] = []
    with ThreadPoolExecutor(num_workers or os.cpu_count() or 1) as threads:
        for start in range(0, len(found.names), AT_ONCE):
            names = found.names[start : start + AT_ONCE]
            for look in threads.map(lambda name: inspect_file(found.root, name, captions), names):
                looks.append(look)
                if progress is not None:
                    progress(len(looks), len(found.names))
    return FolderScan(found, captions, refusal, looks)


def captions_or_why_not(found: Found) -> tuple[Captions, str]:
    try:
        return read_captions(found.root, found.names, found.beside), ""
    except UserError as error:
        return Captions(found.root, frozenset(), {}, by_folder=False), str(error)


@dataclass(frozen=True)
class Sizes:
    smallest: tuple[int, int]
    """width and height of the file with the shortest short side"""
    largest: tuple[int, int]
    median_short_side: int
    common: list[tuple[int, int, int]]
    """width, height, and how many files have them"""


def sizes_of(looks: Sequence[FileReport]) -> Sizes | None:
    if not looks:
        return None
    sizes = [(look.width, look.height) for look in looks]
    return Sizes(
        smallest=min(sizes, key=lambda size: (min(size), max(size))),
        largest=max(sizes, key=lambda size: (min(size), max(size))),
        median_short_side=median_low(min(size) for size in sizes),
        common=[(*size, n) for size, n in Counter(sizes).most_common(5)],
    )


def duplicates_of(looks: Sequence[FileReport]) -> list[list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for look in looks:
        groups[look.digest].append(look.name)
    return [names for names in groups.values() if len(names) > 1]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is told of every medium. `noun` is what a file of the medium is called: "picture"."""

    path: str
    usable: int
    bytes: int
    sizes: Sizes | None
    """None where nothing is usable"""
    captioned: int
    """usable files about which something is said"""
    captions: dict[str, int]
    """where captions stand"""
    captions_refused: str
    """why the captions as a whole cannot be used; "" if they can"""
    duplicates: list[list[str]]
    """groups of files that are the same byte for byte"""
    unusable: list[dict[str, str]]
    """name and reason"""
    other_files: str
    """what else lies there, neither of the medium nor a caption"""

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def size_lines(self) -> Iterator[str]:
        if self.sizes is not None:
            smallest, largest = (
                f"{width} x {height}" for width, height in (self.sizes.smallest, self.sizes.largest)
            )
            span = f"all {smallest}" if len(self.sizes.common) == 1 else f"{smallest} to {largest}"
            yield f"sizes: {span}; median short side {self.sizes.median_short_side}"

    def caption_lines(self, noun: str) -> Iterator[str]:
        if self.captions_refused:
            yield f"captions: unusable. {self.captions_refused}"
        elif self.captions:
            where = ", ".join(f"{n:,} in {place}" for place, n in self.captions.items())
            yield f"captions: {self.captioned:,} of {count(self.usable, f'usable {noun}')} ({where})"
        else:
            yield "captions: none"

    def duplicate_lines(self, noun: str) -> Iterator[str]:
        if self.duplicates:
            copies = sum(len(group) - 1 for group in self.duplicates)
            verb = "is a copy of another" if copies == 1 else "are copies of others"
            yield f"duplicates: {count(copies, noun)} {verb}; one may be learnt from and the other held out"
            yield from indented([" = ".join(group) for group in self.duplicates])

    def other_lines(self) -> Iterator[str]:
        if self.other_files:
            yield f"other files: {self.other_files}"

    def unusable_lines(self, noun: str) -> Iterator[str]:
        yield from listed("unusable", self.unusable, noun, "left out when a run meets them")


def told_of_all(path: str | Path, looked: FolderScan[Any]) -> dict[str, Any]:
    """The fields of a Report, for the Report of a medium to add its own to."""
    return {
        "path": str(path),
        "usable": len(looked.usable),
        "bytes": sum(look.bytes for look in looked.looks),
        "sizes": sizes_of(looked.usable),
        "captioned": sum(bool(look.caption) for look in looked.usable),
        "captions": looked.captions.counts(looked.found.names),
        "captions_refused": looked.refusal,
        "duplicates": duplicates_of(looked.usable),
        "unusable": [
            {"name": look.name, "reason": look.reason} for look in looked.looks if look.reason
        ],
        "other_files": count_by_suffix(
            looked.captions.unrelated(looked.found.names, looked.found.beside)
        ),
    }


def tallied(what: str, counts: dict[str, int]) -> Iterator[str]:
    if counts:
        yield f"{what}: " + ", ".join(f"{one} ({n:,})" for one, n in counts.items())


def unmatched(nouns: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        yield f"captions for {nouns} that are not there: {', '.join(names[:SHOWN])}{more}"


def listed(what: str, entries: Sequence[dict[str, str]], noun: str, fate: str) -> Iterator[str]:
    if entries:
        yield f"{what}: {count(len(entries), noun)}, {fate}"
        yield from indented([f"{each['name']}: {each['reason']}" for each in entries])


def indented(entries: Sequence[str]) -> Iterator[str]:
    yield from (f"  {entry}" for entry in entries[:SHOWN])
    if len(entries) > SHOWN:
        yield f"  and {len(entries) - SHOWN:,} more"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"

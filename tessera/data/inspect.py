"""Inspection of a folder: what can be used, and what cannot with the reasons.

Every file is opened once, as training would. A modality subclasses `FileReport` and `Report` in its
own `inspect.py`. No torch is imported.
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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tessera.data.captions import Captions, read_captions
from tessera.data.discovery import Found, count_by_suffix
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from tessera.data.dataset import Proposal

MAX_SHOWN = 10
"""The number of entries of a long list that are printed; the JSON has them all."""
CHUNK_SIZE = 256
"""The number of files that are passed to the threads at a time, to bound memory."""

Progress = Callable[[int, int], None]
"""Called with the number of files done and the number of all files."""


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """The result of inspecting one file."""

    name: str
    bytes: int = 0
    digest: str = ""
    width: int = 0
    height: int = 0
    caption: str = ""
    reason: str = ""
    """Why the file cannot be used; "" if it can."""


AnyFileReport = TypeVar("AnyFileReport", bound=FileReport)


@dataclass(frozen=True)
class FolderScan(Generic[AnyFileReport]):
    """The reports of all files of a folder."""

    found: Found
    captions: Captions
    caption_error: str
    """Why the captions as a whole cannot be used; "" if they can."""
    files: list[AnyFileReport]

    @property
    def usable(self) -> list[AnyFileReport]:
        return [file for file in self.files if not file.reason]


def scan_folder(
    found: Found,
    inspect_file: Callable[[Path, str, Captions], AnyFileReport],
    num_workers: int | None,
    progress: Progress | None,
) -> FolderScan[AnyFileReport]:
    """Inspect all files in threads; decoders and hashlib release the interpreter's lock."""
    captions, caption_error = Captions.empty(found.root), ""
    try:
        captions = read_captions(found.root, found.names, found.other_files)
    except UserError as error:
        caption_error = str(error)
    files: list[AnyFileReport] = []
    with ThreadPoolExecutor(num_workers or os.cpu_count() or 1) as threads:
        for start in range(0, len(found.names), CHUNK_SIZE):
            names = found.names[start : start + CHUNK_SIZE]
            for file in threads.map(lambda name: inspect_file(found.root, name, captions), names):
                files.append(file)
                if progress is not None:
                    progress(len(files), len(found.names))
    return FolderScan(found, captions, caption_error, files)


@dataclass(frozen=True)
class Sizes:
    smallest: tuple[int, int]
    """Width and height of the file with the shortest short side."""
    largest: tuple[int, int]
    median_short_side: int
    common: list[tuple[int, int, int]]
    """Width, height and the number of files that have them."""


def summarize_sizes(files: Sequence[FileReport]) -> Sizes | None:
    if not files:
        return None
    sizes = [(file.width, file.height) for file in files]
    return Sizes(
        smallest=min(sizes, key=lambda size: (min(size), max(size))),
        largest=max(sizes, key=lambda size: (min(size), max(size))),
        median_short_side=median_low(min(size) for size in sizes),
        common=[(*size, n) for size, n in Counter(sizes).most_common(5)],
    )


def find_duplicates(files: Sequence[FileReport]) -> list[list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for file in files:
        groups[file.digest].append(file.name)
    return [names for names in groups.values() if len(names) > 1]


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of a folder. `noun` is the name of a file of the modality: "image"."""

    path: str
    usable: int
    bytes: int
    sizes: Sizes | None
    """The sizes of the usable files; None if there are none."""
    captioned: int
    """The number of usable files with a caption."""
    captions: dict[str, int]
    """The number of captions by their source."""
    caption_error: str
    """Why the captions as a whole cannot be used; "" if they can."""
    duplicates: list[list[str]]
    """Groups of files with the same content."""
    unusable: list[dict[str, str]]
    """Names and reasons."""
    other_files: str
    """Files that are neither of the modality nor captions, counted by suffix."""

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        raise NotImplementedError

    def propose(self, data: Any, task: Any) -> Proposal | None:
        """Return settings that suit these files, where the modality has such settings."""
        return None

    def as_json(self, commands: Sequence[str] = ()) -> str:
        """Return the report with the commands that train on the folder."""
        content = asdict(self) | {"commands": list(commands)}
        return json.dumps(content, indent=2, ensure_ascii=False)

    def size_lines(self) -> Iterator[str]:
        if self.sizes is not None:
            sizes = (self.sizes.smallest, self.sizes.largest)
            smallest, largest = (f"{width} x {height}" for width, height in sizes)
            span = f"all {smallest}" if len(self.sizes.common) == 1 else f"{smallest} to {largest}"
            yield f"sizes: {span}; median short side {self.sizes.median_short_side}"

    def caption_lines(self, noun: str) -> Iterator[str]:
        if self.caption_error:
            yield f"captions: unusable. {self.caption_error}"
        elif self.captions:
            sources = ", ".join(f"{n:,} in {source}" for source, n in self.captions.items())
            usable = count_nouns(self.usable, f"usable {noun}")
            yield f"captions: {self.captioned:,} of {usable} ({sources})"
        else:
            yield "captions: none"

    def duplicate_lines(self, noun: str) -> Iterator[str]:
        if self.duplicates:
            copies = sum(len(group) - 1 for group in self.duplicates)
            verb = "is a copy of another" if copies == 1 else "are copies of others"
            yield (
                f"duplicates: {count_nouns(copies, noun)} {verb}; one may be trained on while the "
                "other is held out"
            )
            yield from indent_lines([" = ".join(group) for group in self.duplicates])

    def other_lines(self) -> Iterator[str]:
        if self.other_files:
            yield f"other files: {self.other_files}"

    def unusable_lines(self, noun: str) -> Iterator[str]:
        yield from list_problems("unusable", self.unusable, noun, "skipped in training")


def common_fields(path: str | Path, scan: FolderScan[AnyFileReport]) -> dict[str, Any]:
    """Return the fields that the reports of all modalities share."""
    found = scan.found
    unusable = [{"name": file.name, "reason": file.reason} for file in scan.files if file.reason]
    return {
        "path": str(path),
        "usable": len(scan.usable),
        "bytes": sum(file.bytes for file in scan.files),
        "sizes": summarize_sizes(scan.usable),
        "captioned": sum(bool(file.caption) for file in scan.usable),
        "captions": scan.captions.counts(found.names),
        "caption_error": scan.caption_error,
        "duplicates": find_duplicates(scan.usable),
        "unusable": unusable,
        "other_files": count_by_suffix(scan.captions.unrelated(found.names, found.other_files)),
    }


def count_lines(title: str, counts: dict[str, int]) -> Iterator[str]:
    if counts:
        yield f"{title}: " + ", ".join(f"{one} ({n:,})" for one, n in counts.items())


def unmatched_lines(nouns: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - MAX_SHOWN:,} more" if len(names) > MAX_SHOWN else ""
        yield f"captions for {nouns} that do not exist: {', '.join(names[:MAX_SHOWN])}{more}"


def list_problems(
    title: str, entries: Sequence[dict[str, str]], noun: str, consequence: str
) -> Iterator[str]:
    if entries:
        yield f"{title}: {count_nouns(len(entries), noun)}, {consequence}"
        yield from indent_lines([f"{each['name']}: {each['reason']}" for each in entries])


def indent_lines(entries: Sequence[str]) -> Iterator[str]:
    yield from (f"  {entry}" for entry in entries[:MAX_SHOWN])
    if len(entries) > MAX_SHOWN:
        yield f"  and {len(entries) - MAX_SHOWN:,} more"


def count_nouns(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds as in "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def hash_file(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the digest of a file, or of all files directly in a folder.

    Files are read in pieces, since videos may not fit into memory.
    """
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "blake2b").digest())
    return sum(file.stat().st_size for file in files), digest.hexdigest()

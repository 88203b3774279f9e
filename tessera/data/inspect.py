"""Inspection of a folder: what can be used, and what cannot with the reasons.

Every file is opened once, as training would, in worker processes: a file that ends the process that
reads it is reported like any other unusable one. A modality subclasses `FileReport` and `Report` in
its own `inspect.py`. No torch is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tessera.data.collection import FileCollection
from tessera.data.errors import UnreadableFile, guard_reading, is_defect
from tessera.data.files import AnyFile, StoredFile, file_signature, open_file
from tessera.data.workers import Monitor, WorkerPool
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from tessera.data.dataset import Proposal

MAX_SHOWN = 10
"""The number of entries of a long list that are printed; the JSON has them all."""
MAX_SECONDS = 600.0
"""A file that takes longer to be decoded is reported as unusable."""

Progress = Callable[[int, int], None]
"""Called with the number of files done and the number of all files."""


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """The result of inspecting one file."""

    name: str = ""
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
    """The reports of all files of a folder or another collection."""

    found: FileCollection
    """The files, with their captions if these can be used."""
    caption_error: str
    """Why the captions as a whole cannot be used; "" if they can."""
    files: list[AnyFileReport]

    @property
    def usable(self) -> list[AnyFileReport]:
        return [file for file in self.files if not file.reason]


@dataclass(frozen=True)
class InspectFiles(Generic[AnyFileReport]):
    """Inspect files by number; a class, so that it can be sent to a worker."""

    found: FileCollection
    inspect_file: Callable[[AnyFile], AnyFileReport]
    report: type[AnyFileReport]

    def __call__(self, block: Sequence[int], monitor: Monitor) -> list[AnyFileReport]:
        return [self.inspect(number, monitor) for number in block]

    def inspect(self, number: int, monitor: Monitor) -> AnyFileReport:
        """Inspect one file; whatever its content raises is the reason why it is unusable."""
        name, file = self.found.names[number], self.found.file(number)
        try:
            monitor.begin(number)
            with guard_reading(str(file)):
                report = self.inspect_file(file)
                caption = next(iter(self.found.captions(number)), "")
                return replace(report, name=name, caption=caption)
        except UnreadableFile as error:
            return self.report(
                name=name, bytes=file_size(file), reason=str(error).removeprefix(f"{file}: ")
            )


def scan_folder(
    found: FileCollection,
    inspect_file: Callable[[AnyFile], AnyFileReport],
    report: type[AnyFileReport],
    num_workers: int | None,
    progress: Progress | None,
) -> FolderScan[AnyFileReport]:
    """Inspect all files in worker processes; `inspect_file` may raise UnreadableFile."""
    caption_error = ""
    try:
        found = found.with_captions()
    except UserError as error:
        caption_error = str(error)
    files: list[AnyFileReport] = []
    count = min(num_workers or os.cpu_count() or 1, max(1, len(found)))
    inspect = InspectFiles(found, inspect_file, report)
    pool = WorkerPool(inspect, count, max_seconds=MAX_SECONDS)
    for inspected in pool.results([number] for number in range(len(found))):
        files += inspected
        if progress is not None:
            progress(len(files), len(found))
    return FolderScan(found, caption_error, files)


def file_size(file: AnyFile) -> int:
    """Return the size of a file or of the files in a folder; 0 if it cannot be determined."""
    try:
        return file_signature(file).bytes
    except Exception as error:  # of a cell in a damaged table, nearly any type
        if is_defect(error):
            raise
        return 0


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
    notices: list[str] = field(default_factory=list)
    """What cannot be used of archives and tables as a whole."""

    @property
    def has_texts(self) -> bool:
        """Whether files have texts of their own as captions, not names of folders or classes."""
        return bool(self.captioned and {"text files", "metadata", "columns"} & self.captions.keys())

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        raise NotImplementedError

    def propose(self, data: Any, task: Any) -> Proposal | None:
        """Return settings that suit these files, where the modality has such settings."""
        return None

    def as_json(
        self,
        commands: Sequence[str] = (),
        split: Mapping[str, object] | None = None,
        remarks: Sequence[str] = (),
    ) -> str:
        """Return the report with the split, the commands that train on the folder, and remarks on
        them."""
        content = asdict(self) | {
            "split": split,
            "commands": list(commands),
            "remarks": list(remarks),
        }
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
        yield from self.notices
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
        "captions": found.count_captions(),
        "caption_error": scan.caption_error,
        "duplicates": find_duplicates(scan.usable),
        "unusable": unusable,
        "other_files": found.describe_unrelated(),
        "notices": list(found.notices),
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


def hash_file(file: AnyFile) -> tuple[int, str]:
    """Return the size in bytes and the digest of a file, or of all files directly in a folder.

    Files are read in pieces, since videos may not fit into memory.
    """
    files: list[AnyFile] = [file]
    if not isinstance(file, StoredFile) and Path(file).is_dir():
        files = [one for one in sorted(Path(file).iterdir()) if one.is_file()]
    digest = hashlib.blake2b(digest_size=16)
    for one in files:
        with open_file(one) as data:
            while piece := data.read(1 << 20):
                digest.update(piece)
    return sum(file_signature(one).bytes for one in files), digest.hexdigest()

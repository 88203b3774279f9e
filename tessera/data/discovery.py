"""Discovery of files: list a folder without opening a file.

Names are paths relative to the folder, with "/" on every system, in sorted order.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError


@dataclass(frozen=True)
class FileSignature:
    """Size and modification time of a file, or of a folder and the files in it."""

    path: str
    bytes: int
    modified_ns: int


def file_signature(path: str | Path) -> FileSignature:
    status = Path(path).stat()
    inside = [file.stat() for file in Path(path).iterdir()] if stat.S_ISDIR(status.st_mode) else []
    entries = [status, *inside]
    size = sum(entry.st_size for entry in entries)
    return FileSignature(str(path), size, max(entry.st_mtime_ns for entry in entries))


@dataclass(frozen=True)
class Found:
    root: Path
    names: list[str]
    """The files of the modality."""
    other_files: list[str]
    """Every other visible file: captions, metadata and unrelated files."""


def find_files(path: str | Path, suffixes: tuple[str, ...], noun: str) -> Found:
    """Find the files of a modality in a folder, or a single file; `noun` is "images", say."""
    root = expand_path(path, noun)
    if root.is_file():
        return find_single_file(root, suffixes, noun)
    if not root.is_dir():
        raise UserError(
            f"{path} does not exist (that is, {root.absolute()}): give a folder of {noun}."
        )
    files = list_fixed_files(root)
    names = [name for name in files if name.lower().endswith(suffixes)]
    if not names:
        instead = f"only {count_by_suffix(files)}" if files else "no files at all"
        raise UserError(
            f"{path} has no {noun}: expected files ending in {', '.join(suffixes)}, also in "
            f"subfolders, found {instead}."
        )
    wanted = set(names)
    return Found(root, names, [name for name in files if name not in wanted])


def expand_path(path: str | Path, noun: str = "files") -> Path:
    """Return a path with the home folder in place of ~; raise UserError if it cannot be one."""
    if not str(path).strip():
        raise UserError(f"The path of the data is empty: give a folder of {noun}.")
    try:
        root = Path(path).expanduser()
        root.is_file()  # fails for names that are too long, or contain a zero
        return root
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{str(path)[:200]} cannot be opened ({reason}): give a folder of {noun}."
        ) from None


@dataclass
class Listing:
    """The files of a folder as they were when a run started."""

    files: list[str] | None = None
    """None until the folder is listed."""


_LISTING: ContextVar[Listing | None] = ContextVar("listing", default=None)


@contextmanager
def fixed_listing(listing: Listing) -> Iterator[None]:
    """Use a listing instead of the present files of the folder, or fill it if it has none."""
    token = _LISTING.set(listing)
    try:
        yield
    finally:
        _LISTING.reset(token)


def list_fixed_files(root: Path) -> list[str]:
    listing = _LISTING.get()
    if listing is None:
        return list_files(root)
    if listing.files is None:
        listing.files = list_files(root)
    return listing.files


def find_single_file(file: Path, suffixes: tuple[str, ...], noun: str) -> Found:
    if not file.name.lower().endswith(suffixes):
        raise UserError(
            f"{file} is a file of another kind than the {noun} that can be read "
            f"({', '.join(suffixes)}): give such a file, or a folder of {noun} (unpack archives "
            "first)."
        )
    text = file.with_suffix(".txt")
    return Found(file.parent, [file.name], [text.name] if text.is_file() else [])


def list_files(folder: str | Path) -> list[str]:
    """List all visible files below a folder, sorted; 100,000 files take about a second.

    Links to folders are followed, each folder once and real folders first, so a link that leads
    back up ends there. A link that leads nowhere is listed, so that it can be reported. Folders of
    runs are left out: a run must not read its own samples.
    """
    names: list[str] = []
    visited: set[tuple[int, int]] = set()
    folders: list[str] = [""]
    linked: list[str] = []
    while folders or linked:
        prefix = folders.pop() if folders else linked.pop(0)
        entries = list_entries(os.path.join(folder, prefix), visited)
        has_config = any(entry.name == "config.json" for entry in entries)
        if prefix and has_config and RunDirectory(os.path.join(folder, prefix)).is_run():
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if is_folder(entry):
                (linked if entry.is_symlink() else folders).append(f"{prefix}{entry.name}/")
            elif entry.is_symlink() or entry.is_file():  # no pipe or socket: reading would block
                names.append(prefix + entry.name)
    return sorted(names)


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that may not be entered
        return False


def list_entries(folder: str, visited: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """List a folder by name, or return nothing if it was visited under any name."""
    try:
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:
            return []
        visited.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"The folder {folder} cannot be listed ({reason}).") from error


def count_by_suffix(names: Iterable[str]) -> str:
    """Return the most common suffixes, as in "12 .mp4, 3 .txt"."""
    counts = Counter(os.path.splitext(name)[1].lower() or "without suffix" for name in names)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(5))

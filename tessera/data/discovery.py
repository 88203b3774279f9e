"""What lies in a folder: a listing without opening a file, and a letter when there is nothing to
learn from.

Names are paths relative to the folder, with "/" on every system, in one fixed order.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tessera.run.directory import UserError


@dataclass(frozen=True)
class FileSignature:
    """What stays as it is while a file does, or a folder and its frames."""

    path: str
    bytes: int
    changed_ns: int


def file_signature(path: str | Path) -> FileSignature:
    """One question to the file system for a file, which may be one of a million; and one more for
    each frame of a folder."""
    about = Path(path).stat()
    inside = [file.stat() for file in Path(path).iterdir()] if stat.S_ISDIR(about.st_mode) else []
    full = [about, *inside]
    return FileSignature(
        str(path), sum(each.st_size for each in full), max(each.st_mtime_ns for each in full)
    )


@dataclass(frozen=True)
class Found:
    root: Path
    names: list[str]
    """the files of the medium"""
    beside: list[str]
    """every other visible file: captions, metadata, and what does not belong"""


def find(path: str | Path, endings: tuple[str, ...], what: str) -> Found:
    """The files of a medium (`what`, in the plural: "pictures") in a folder, or one such file by
    itself."""
    root = Path(path).expanduser()
    if root.is_file():
        return single_file(root, endings, what)
    if not root.is_dir():
        raise UserError(
            f"There is nothing at {path} (that is, {root.absolute()}): give a folder of {what}."
        )
    files = scan(root)
    names = [name for name in files if name.lower().endswith(endings)]
    if not names:
        raise UserError(
            f"{path} holds no {what}: files ending in {', '.join(endings)} are looked for, in subfolders too, "
            f"but {'the folder is empty' if not files else 'there are only ' + count_by_suffix(files)}."
        )
    wanted = set(names)
    return Found(root, names, [name for name in files if name not in wanted])


def single_file(file: Path, endings: tuple[str, ...], what: str) -> Found:
    if not file.name.lower().endswith(endings):
        raise UserError(
            f"{file} is a file, but not one of the {what} that can be read ({', '.join(endings)}): "
            f"give such a file, or a folder of {what} (an archive must be unpacked first)."
        )
    text = file.with_suffix(".txt")
    return Found(file.parent, [file.name], [text.name] if text.is_file() else [])


def scan(folder: str | Path) -> list[str]:
    """All visible files below a folder, sorted. Opens none, so that 100,000 files take about a
    second.

    Links to folders are followed, each folder once, real ones first: a link that leads back up ends
    there instead of going round for ever. A link to a file that is not there is listed, so that
    somebody can be told about it.
    """
    names: list[str] = []
    seen: set[tuple[int, int]] = set()
    folders: list[str] = [""]
    linked: list[str] = []
    while folders or linked:
        prefix = folders.pop() if folders else linked.pop(0)
        for entry in entries(os.path.join(folder, prefix), seen):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                (linked if entry.is_symlink() else folders).append(f"{prefix}{entry.name}/")
            elif (
                entry.is_file() or entry.is_symlink()
            ):  # neither: a pipe or socket, on which a reader would hang
                names.append(prefix + entry.name)
    return sorted(names)


def entries(folder: str, seen: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """What lies in a folder, by name; nothing if the folder was seen before, under whatever
    name."""
    try:
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            return []
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(
            f"The folder {folder} cannot be listed ({error.strerror or error})."
        ) from error


def count_by_suffix(names: Iterable[str]) -> str:
    """ "12 .mp4, 3 .txt": what there is instead."""
    counts = Counter(os.path.splitext(name)[1].lower() or "without ending" for name in names)
    return ", ".join(f"{count:,} {ending}" for ending, count in counts.most_common(5))

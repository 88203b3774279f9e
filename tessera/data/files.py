"""Files that are read and written.

What a decoder reads is a file, or content inside another file (`StoredFile`). Readers take either
of them, so an image in an archive is read exactly as one in a folder. No torch is imported.
"""

from __future__ import annotations

import io
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, cast

WRITTEN_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}\Z")


class StoredFile(ABC):
    """Content inside another file: a member of an archive, or a cell of a table.

    Subclasses are hashable and small, because results of probing are cached by them; `str` is the
    location for error messages.
    """

    @property
    @abstractmethod
    def suffix(self) -> str:
        """The suffix of its name, as in ".png"."""

    @abstractmethod
    def signature(self) -> FileSignature:
        """Return its size, and the modification time of the file around it."""

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open the content, for reading and seeking."""


AnyFile = str | Path | StoredFile


@dataclass(frozen=True)
class FileSignature:
    """Size and modification time of a file, or of a folder and the files in it."""

    file: str | StoredFile
    bytes: int
    modified_ns: int

    def as_text(self) -> list[str]:
        """Return texts that are equal if and only if the signatures are."""
        return [str(self.file), str(self.bytes), str(self.modified_ns)]


def file_signature(file: AnyFile) -> FileSignature:
    if isinstance(file, StoredFile):
        return file.signature()
    status = Path(file).stat()
    inside = [one.stat() for one in Path(file).iterdir()] if stat.S_ISDIR(status.st_mode) else []
    entries = [status, *inside]
    size = sum(entry.st_size for entry in entries)
    return FileSignature(str(file), size, max(entry.st_mtime_ns for entry in entries))


def file_suffix(file: AnyFile) -> str:
    """Return the suffix of a file in lower case, as in ".png"."""
    return (file.suffix if isinstance(file, StoredFile) else Path(file).suffix).lower()


def open_file(file: AnyFile) -> BinaryIO:
    return file.open() if isinstance(file, StoredFile) else open(file, "rb")


@contextmanager
def decoder_input(file: AnyFile) -> Iterator[str | BinaryIO]:
    """Yield what a native decoder opens: the path of a file, or the open content of another."""
    if isinstance(file, StoredFile):
        with file.open() as content:
            yield content
    else:
        yield str(file)


@dataclass(frozen=True)
class FilePart(StoredFile):
    """A range of bytes of a file under a name: a member of a tar archive."""

    path: str
    offset: int
    size: int
    modified_ns: int
    """The modification time of the file when it was indexed."""
    name: str

    def __str__(self) -> str:
        return f"{self.path}/{self.name}"

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.name)[1]

    def signature(self) -> FileSignature:
        return FileSignature(self, self.size, self.modified_ns)

    def open(self) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(RawFilePart(self)))


class RawFilePart(io.RawIOBase):
    """The bytes of a `FilePart` as an open file.

    It reads at explicit positions, so that processes that share a descriptor do not interfere.
    """

    def __init__(self, part: FilePart):
        self.part, self.position = part, 0
        self.file = open_descriptor(part.path, part.modified_ns)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.part.size}[whence]
        if start + offset < 0:
            raise OSError(22, "Invalid argument")
        self.position = start + offset
        return self.position

    def readall(self) -> bytes:
        """Read the rest at once; the method of the base class reads a few kilobytes at a time."""
        count = max(0, self.part.size - self.position)
        data = os.pread(self.file.descriptor, count, self.part.offset + self.position)
        self.position += len(data)
        return data

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self.part.size - self.position))
        data = os.pread(self.file.descriptor, count, self.part.offset + self.position)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


@dataclass(frozen=True)
class OpenDescriptor:
    """An open file, closed when nothing refers to it any more."""

    descriptor: int

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)  # a default, because modules are gone when the interpreter ends


@lru_cache(maxsize=128)
def open_descriptor(path: str, modified_ns: int) -> OpenDescriptor:
    """Open a file, or return it if it is open; a file that was replaced since has another time."""
    return OpenDescriptor(os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))


def read_range(path: str, modified_ns: int, offset: int, size: int) -> bytes:
    """Read some bytes of a file, fewer if it ends before."""
    return os.pread(open_descriptor(path, modified_ns).descriptor, size, offset)


# ---- writing


def written_suffix(path: str | Path) -> str:
    """Return the suffix of a file to be written in lower case, or "" if the name has none.

    A suffix is a dot and two to five characters, the first of which is alphabetic. All other
    endings belong to the name, as in "guidance-1.5" and ".cache".
    """
    name = Path(path).name
    found = WRITTEN_SUFFIX.search(name)
    return "" if found is None or found.start() == 0 else found.group().lower()


def resolve_suffix(path: str | Path, default: str, allowed: Sequence[str]) -> Path:
    """Return `path` with a suffix in `allowed`, appending `default` where it has none.

    Only what `written_suffix` returns is one, so "guidance-1.5" becomes "guidance-1.5.png".
    Suffixes are compared in lower case and kept as given.

    Raises:
        ValueError: If the path has a suffix that is not in `allowed`.
    """
    path = Path(path)
    suffix = written_suffix(path)
    if not suffix:
        return path.with_name(path.name + default)
    if suffix not in allowed:
        raise ValueError(
            f"{path} ends in {path.suffix}, but the formats that can be written are "
            f"{', '.join(allowed)}: use one of these, or no suffix for {default}"
        )
    return path

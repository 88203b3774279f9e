"""Collections of files: the examples of a folder, of tar shards, of a table or of a list of paths.

A collection has the files of one modality in a fixed order, with their names and captions. Datasets
and `tessera check` use this interface only. No torch is imported.
"""

from __future__ import annotations

import os
import posixpath
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, overload

import numpy as np

from tessera.data.captions import (
    METADATA,
    Captions,
    find_unrelated,
    read_captions,
    read_metadata_fields,
)
from tessera.data.files import StoredFile, file_signature

CAPTION_SOURCES = ("text files", "metadata", "class labels", "columns", "folder names")
"""Where captions come from, in the order of reports."""
NO_CAPTION = "none"


class FileCollection(ABC):
    """The files of a modality by index, with their captions."""

    names: Sequence[str]
    notices: Sequence[str] = ()
    """What cannot be used of the collection as a whole, such as the rest of a truncated archive."""

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def file(self, index: int) -> str | StoredFile:
        """Return the path of a file, or its content inside another file."""

    @abstractmethod
    def select(self, indices: Iterable[int]) -> Self:
        """Return some of the files."""

    @abstractmethod
    def with_captions(self) -> Self:
        """Return the same files with their captions; UserError if these cannot be used."""

    @abstractmethod
    def without_captions(self) -> Self:
        """Return the same files with empty captions."""

    @abstractmethod
    def captions(self, index: int, *, lines: bool = False) -> list[str]:
        """Return all captions of a file; with `lines`, each line of its text file is one."""

    @abstractmethod
    def caption_source(self, index: int) -> str:
        """Return one of CAPTION_SOURCES, or NO_CAPTION."""

    def tags(self, index: int) -> tuple[str, ...]:
        """Return the tags of a file."""
        return ()

    def metadata(self) -> Sequence[Mapping[str, object]]:
        """Return the fields of the metadata of each file, such as its speaker."""
        return [{}] * len(self)

    def classes(self) -> list[str]:
        """Return the class names if the captions are classes, else nothing."""
        return []

    def unmatched_captions(self) -> Sequence[str]:
        """Return the names for which there is a caption and no file."""
        return ()

    def describe_unrelated(self) -> str:
        """Return what is neither a file of the modality nor a caption, counted by suffix."""
        return ""

    def signature(self, index: int) -> str:
        """Return a string that changes when the file does: size and modification time."""
        try:
            found = file_signature(self.file(index))
        except OSError:
            return "missing"
        return f"{found.bytes} {found.modified_ns}"

    def count_captions(self) -> dict[str, int]:
        """Return how many files have a caption, by its source."""
        sources = Counter(self.caption_source(index) for index in range(len(self)))
        return {source: sources[source] for source in CAPTION_SOURCES if sources[source]}


@dataclass(frozen=True)
class RowNames(Sequence[str]):
    """The names of some rows of a large collection, made when they are needed."""

    rows: np.ndarray
    name: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self.name(int(row)) for row in self.rows[index]]
        return self.name(int(self.rows[index]))

    def __iter__(self) -> Iterator[str]:
        return (self.name(int(row)) for row in self.rows)


@dataclass(frozen=True)
class FolderFiles(FileCollection):
    """Files below a folder, or at paths of a list."""

    root: Path
    names: list[str]
    """The files of the modality, relative to the folder; those of a list may be absolute."""
    other_files: list[str]
    """Every other visible file: captions, metadata and unrelated files."""
    read: Captions | None = None
    """Their captions; None if these are not used."""

    def file(self, index: int) -> str:
        return posixpath.join(self.root.as_posix(), self.names[index])

    def select(self, indices: Iterable[int]) -> Self:
        return replace(self, names=[self.names[index] for index in indices])

    def with_captions(self) -> Self:
        return replace(self, read=read_captions(self.root, self.names, self.other_files))

    def without_captions(self) -> Self:
        return replace(self, read=None)

    def captions(self, index: int, *, lines: bool = False) -> list[str]:
        return [] if self.read is None else self.read.get_all(self.names[index], lines=lines)

    def caption_source(self, index: int) -> str:
        return NO_CAPTION if self.read is None else self.read.source(self.names[index])

    def tags(self, index: int) -> tuple[str, ...]:
        return () if self.read is None else self.read.tags.get(self.names[index], ())

    def metadata(self) -> Sequence[Mapping[str, object]]:
        tables = [name for name in self.other_files if posixpath.basename(name) in METADATA]
        fields = read_metadata_fields(self.root, tables)
        return [fields.get(name, {}) for name in self.names]

    def classes(self) -> list[str]:
        if self.read is None or not self.read.by_folder:
            return []
        return sorted({self.read.get(name) for name in self.names} - {""})

    def unmatched_captions(self) -> Sequence[str]:
        return () if self.read is None else self.read.unmatched

    def describe_unrelated(self) -> str:
        return count_by_suffix(find_unrelated(self.names, self.other_files))


def count_by_suffix(names: Iterable[str]) -> str:
    """Return the most common suffixes, as in "12 .mp4, 3 .txt"."""
    counts = Counter(os.path.splitext(name)[1].lower() or "without suffix" for name in names)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common(5))

"""Whole files in pieces along time: audio and videos of any length.

A dataset of files with a time axis returns the `Extent` of a file, by its header, and loads any
part of it (`FileDataset.extent`, `FileDataset.load_piece`). `PieceDataset` lists the pieces of
files as examples, so that the ordinary loader reads them in worker processes, and no more than a
few pieces are in memory. No torch is imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tessera.data.dataset import Example, ExampleDataset, Extent, FileDataset
from tessera.data.errors import UnreadableFile, guard_reading
from tessera.data.workers import Monitor, WorkerPool
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from tessera.engine.task import Examples


@dataclass(frozen=True)
class TimeRange:
    """The part of a file that is used; by default all of it."""

    start_seconds: float = 0.0
    seconds: float | None = None
    """The length; None for everything up to the end."""

    def __post_init__(self) -> None:
        if not 0 <= self.start_seconds < math.inf:
            raise UserError(f"--start must be at least 0, got {self.start_seconds:g}.")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UserError(f"--seconds must be above 0, got {self.seconds:g}.")

    def positions(self, extent: Extent) -> range:
        """Return the samples or frames of a file of this extent; none if it ends before."""
        start = round(self.start_seconds * extent.rate_hz)
        if self.seconds is None:
            return range(start, extent.length)
        stop = start + max(1, round(self.seconds * extent.rate_hz))
        return range(start, min(stop, extent.length))


ALL = TimeRange()


@dataclass(frozen=True)
class Piece:
    file: int
    """The index of the file in its dataset."""
    start: int
    """The first sample or frame."""
    count: int


@dataclass(frozen=True)
class PieceDataset(ExampleDataset[Example]):
    """Pieces of the files of a dataset, in order; the name of a piece is that of its file."""

    dataset: FileDataset[Example]
    pieces: Sequence[Piece]
    reads_files = True

    def __len__(self) -> int:
        return len(self.pieces)

    def name(self, index: int) -> str:
        return self.dataset.name(self.pieces[index].file)

    def location(self, index: int) -> str:
        return self.dataset.location(self.pieces[index].file)

    def item(self, index: int, rng: np.random.Generator) -> Example:
        piece = self.pieces[index]
        return self.dataset.load_piece(piece.file, piece.start, piece.count)

    def collate(self, examples: list[Example]) -> Examples:
        return self.dataset.config.collate(examples)


@dataclass(frozen=True)
class FileExtent:
    """What the header of a file declares."""

    index: int
    extent: Extent | None
    """None if the file cannot be read, or has no time axis."""
    reason: str = ""
    """Why it cannot be read."""
    declared: Extent | None = None
    """The extent without damage, which is longer if the file was cut short."""


@dataclass(frozen=True)
class MeasureFiles:
    """Read the extents of files by number; a class, so that it can be sent to a worker."""

    dataset: FileDataset

    def __call__(self, block: Sequence[int], monitor: Monitor) -> list[FileExtent]:
        return [self.measure(index, monitor) for index in block]

    def measure(self, index: int, monitor: Monitor) -> FileExtent:
        try:
            monitor.begin(index)
            with guard_reading(self.dataset.location(index)):
                extent = self.dataset.extent(index)
                return FileExtent(index, extent, declared=self.dataset.declared_extent(index))
        except UnreadableFile as error:
            return FileExtent(index, None, str(error))
        finally:
            monitor.end()


def measure_extents(
    dataset: FileDataset, indices: Sequence[int], num_workers: int
) -> Iterator[FileExtent]:
    """Read the headers of files, in order."""
    pool = WorkerPool(MeasureFiles(dataset), num_workers)
    for extents in pool.results([index] for index in indices):
        yield from extents


def split_range(file: int, positions: range, piece_length: int) -> list[Piece]:
    """Divide a part of a file into pieces of one length; the last one may be shorter."""
    return [
        Piece(file, start, min(piece_length, positions.stop - start))
        for start in range(positions.start, positions.stop, piece_length)
    ]

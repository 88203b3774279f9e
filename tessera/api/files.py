"""Whole files with a tokenizer: encode recordings and videos of any length, and decode codes.

    for file in encode_files(TimedFiles(dataset, tokenizer), range(len(dataset))):
        write_media(tokenizer.decode_pieces(file.codes, file.extent), "out.wav")

Files are read in pieces by worker processes. A causal model processes them one after the other with
the codes of the whole, in bounded memory (`MediaAdapter.encode_pieces`).
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol, runtime_checkable

from torch import Tensor

from tessera.api.tokenizer import Tokenizer
from tessera.data.dataset import ExampleDataset, Extent, FileDataset
from tessera.data.loader import EvalLoader
from tessera.data.pieces import (
    ALL,
    FileExtent,
    Piece,
    PieceDataset,
    TimeRange,
    measure_extents,
    split_range,
)
from tessera.data.tokens import StoredTokens, stack_padded
from tessera.engine.task import Batch, Examples, Media
from tessera.objectives.generation import MediaTokenizer
from tessera.run.errors import UserError, as_user_error

TOLERANCE_SECONDS = 0.25
"""A file that ends earlier than its header declares, by more than this, is reported."""
DECODE_BATCH = 16
"""The number of examples without a time axis that are decoded together."""


@dataclass(frozen=True)
class EncodedFile:
    """The codes of one file, or the reason why it has none."""

    index: int
    name: str
    codes: Tensor | None = None
    """(t, ...), or None if nothing of the file can be read."""
    extent: Extent = Extent(0, 1.0)
    """The length of the part that was encoded."""
    original: Media | None = None
    """The first piece."""
    notice: str = ""
    """Why the file, or a part of it, is missing."""


def find_timed(dataset: ExampleDataset, tokenizer: MediaTokenizer) -> TimedFiles | None:
    """Return files and tokenizer if the files can be encoded whole, in pieces along time."""
    if not isinstance(dataset, FileDataset) or dataset.piece_length is None:
        return None
    if not isinstance(tokenizer, Tokenizer) or not tokenizer.has_time:
        return None
    return TimedFiles(dataset, tokenizer)


@dataclass(frozen=True)
class TimedFiles:
    """Recordings or videos, and a tokenizer that encodes them in pieces."""

    dataset: FileDataset
    tokenizer: Tokenizer


def encode_files(
    files: TimedFiles,
    indices: Sequence[int],
    part: TimeRange = ALL,
    num_workers: int = 0,
    keep_original: bool = False,
) -> Iterator[EncodedFile]:
    """Encode files, one after the other; with `keep_original`, return their first pieces too."""
    dataset = files.dataset
    plans = [
        plan_file(dataset, found, part) for found in measure_extents(dataset, indices, num_workers)
    ]
    pieces = PieceDataset(dataset, [piece for plan in plans for piece in plan.pieces])
    batches = EvalLoader(pieces, seed=0, batch_size=1, num_workers=num_workers).batches()
    for plan in plans:
        loaded = list_lazily(batches, len(plan.pieces))
        yield encode_file(files.tokenizer, plan, loaded, keep_original)


@dataclass(frozen=True)
class FilePlan:
    """The pieces of a file that are read."""

    index: int
    name: str
    extent: Extent
    pieces: Sequence[Piece] = ()
    notice: str = ""
    """Why there are no pieces."""
    declared_seconds: float = 0.0
    """The length of the part by the header, which is more than the extent if the file was cut
    short."""


def plan_file(dataset: FileDataset, found: FileExtent, part: TimeRange) -> FilePlan:
    assert dataset.piece_length is not None
    index, name, nothing = found.index, dataset.name(found.index), Extent(0, 1.0)
    if found.extent is None:
        return FilePlan(index, name, nothing, notice=f"Skipped {name}: {found.reason}")
    positions = part.positions(found.extent)
    if not positions:
        end = f"it has {found.extent.seconds:.2f} s, but --start is {part.start_seconds:g}"
        return FilePlan(index, name, nothing, notice=f"Skipped {name}: {end}")
    rate_hz = found.extent.rate_hz
    declared = found.declared or found.extent
    return FilePlan(
        index,
        name,
        Extent(len(positions), rate_hz),
        split_range(index, positions, dataset.piece_length),
        declared_seconds=len(part.positions(declared)) / rate_hz,
    )


def list_lazily(batches: Iterator[Batch], count: int) -> Generator[Batch]:
    """Yield the next `count` batches, and consume those that are not used."""
    remaining = itertools.islice(batches, count)
    try:
        yield from remaining
    finally:
        for _ in remaining:
            pass


def encode_file(
    tokenizer: Tokenizer, plan: FilePlan, batches: Generator[Batch], keep_original: bool
) -> EncodedFile:
    """Encode the pieces of a file up to the first that cannot be read."""
    originals: list[Media] = []
    lengths: list[int] = []
    reasons = [plan.notice] if plan.notice else []

    def examples() -> Iterator[Examples]:
        for batch in batches:
            if not len(batch):
                reasons.append(f"{batch.rejected[0][1]}")
                return
            if keep_original and not originals:
                originals.append(tokenizer.network.adapter.original(batch.examples))
            lengths.append(int(batch.examples.lengths[0]))
            yield batch.examples

    pieces = examples()
    first = next(pieces, None)
    if first is None:
        batches.close()
        notice = plan.notice or f"Skipped {plan.name}: {reasons[0]}"
        return EncodedFile(plan.index, plan.name, notice=notice)
    codes = tokenizer.encode_pieces(itertools.chain([first], pieces)).cpu()
    batches.close()
    extent = Extent(sum(lengths), plan.extent.rate_hz)
    notice = ""
    if extent.seconds < plan.declared_seconds - TOLERANCE_SECONDS:
        reason = f" ({reasons[0]})" if reasons else ""
        notice = f"{plan.name} ends after {extent.seconds:.2f} of {plan.declared_seconds:.2f} s"
        notice += reason
    return EncodedFile(
        plan.index, plan.name, codes, extent, originals[0] if originals else None, notice
    )


# ---- media from codes


@runtime_checkable
class PiecewiseMedia(Protocol):
    """Media that are written in pieces along time."""

    @classmethod
    def write_pieces(cls, pieces: Iterable[Media], path: str | Path) -> Path: ...


def write_media(pieces: Iterator[Media], path: Path) -> Path:
    """Write media that arrive in pieces; the suffix of the path selects the format."""
    first = next(pieces)
    with as_user_error(ValueError):
        if isinstance(first, PiecewiseMedia):
            return type(first).write_pieces(itertools.chain([first], pieces), path)
        return first.save(path)


def decode_stored(
    tokenizer: Tokenizer, stored: StoredTokens
) -> Iterator[tuple[str, Iterator[Media]]]:
    """Yield the name of each example and its medium, in pieces."""
    if stored.extents and tokenizer.plays_whole_files:
        for name, row, extent in zip(stored.names, stored.rows, stored.extents, strict=True):
            yield name, tokenizer.decode_pieces(row, extent)
        return
    for start in range(0, len(stored.names), DECODE_BATCH):
        rows = stored.rows[start : start + DECODE_BATCH]
        # Examples of different lengths are decoded alone: padding them could be costly.
        is_uniform = len({row.shape for row in rows}) == 1
        groups = [rows] if is_uniform else [[row] for row in rows]
        media = [one for group in groups for one in tokenizer.to_media(stack_padded(group))]
        for name, one in zip(stored.names[start : start + DECODE_BATCH], media, strict=True):
            yield name, iter([one])


@dataclass
class OutputNames:
    """Where media are written: under their own names, in one format or in that of their files."""

    folder: Path
    suffixes: Sequence[str]
    """The formats that can be written, the default first; empty if the medium has only one."""
    format: str | None = None
    """The suffix of all files; None keeps that of the original where it can be written."""

    def __post_init__(self) -> None:
        self.taken: set[str] = set()
        if self.format is not None:
            self.format = f".{self.format.lower().removeprefix('.')}"
            if self.format not in self.suffixes:
                known = ", ".join(one.removeprefix(".") for one in self.suffixes) or "none"
                raise UserError(
                    f"--format {self.format.removeprefix('.')} cannot be written for this medium: "
                    f"its formats are {known}."
                )

    def path(self, name: str) -> Path:
        """Return the path for the example with this name; no two are the same."""
        stem, suffix = posixpath.splitext(check_name(name))
        chosen = self.format or suffix.lower()
        if chosen not in self.suffixes:
            chosen = self.suffixes[0] if self.suffixes else ""
        # "a.mp3" beside "a.wav" becomes "a.mp3.wav".
        path = stem + chosen
        if path in self.taken or suffix.lower() == "":
            path = name + chosen
        self.taken.add(path)
        return self.folder / path


def check_name(name: str) -> str:
    """Raise UserError for a name that leads out of the output folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in parts[0]:
        raise UserError(f"The name {name!r} of an example leads out of the output folder.")
    return name

"""Whole files on the command line: `tokenize`, `decode`, and `sample` of a codec."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tessera.api.files import (
    OutputNames,
    TimedFiles,
    decode_stored,
    encode_files,
    find_timed,
    write_media,
)
from tessera.api.generator import data_at, get_tokenizer, open_dataset
from tessera.api.tokenizer import DatasetPart, Tokenizer, encode_dataset
from tessera.cli.output import find_output_file
from tessera.data.dataset import ExampleDataset, spread_examples
from tessera.data.pieces import TimeRange
from tessera.data.tokens import INDEX, TokenEntry, TokenWriter, read_fingerprint, read_tokens
from tessera.engine.task import Media
from tessera.objectives.generation import GeneratorTask, MediaTokenizer
from tessera.objectives.reconstruction import TokenizerTask
from tessera.run.errors import UserError
from tessera.run.load import TrainedRun

Notify = Callable[[list[str]], None]


def list_tokenizers(trained: TrainedRun) -> dict[str, MediaTokenizer]:
    """Return the tokenizers of a run by the subfolder of their codes."""
    if isinstance(trained.task, GeneratorTask):
        task = trained.task
        return {name: get_tokenizer(task, name) for name in task.tokenizers}
    return {".": Tokenizer(trained)}


# ---- tokenize


@dataclass(frozen=True)
class TokenizeRequest:
    """What `tessera tokenize` writes."""

    out: Path
    part: TimeRange
    whole: bool
    batch_size: int
    num_workers: int


def tokenize_data(
    trained: TrainedRun, data: str | None, request: TokenizeRequest, notify: Notify
) -> list[str]:
    """Write the codes of all examples with each tokenizer of a run; return a line for each."""
    dataset = data_at(trained, data).full(captions=False)
    signatures = [dataset.signature(i) for i in range(len(dataset))]
    lines = []
    for name, tokenizer in list_tokenizers(trained).items():
        timed = find_timed(dataset, tokenizer) if request.whole else None
        if request.part != TimeRange() and timed is None:
            raise UserError(
                "--start and --seconds are for whole recordings and videos: leave them out."
            )
        names = [dataset.name(i) for i in range(len(dataset))]
        identity = json.dumps([names, signatures, request.batch_size, str(timed and request.part)])
        source = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
        folder = request.out / name
        writer = TokenWriter(folder, tokenizer.info(), source)
        if writer.num_read:
            lines.append(f"Continuing after {writer.num_read:,} examples in {folder}")
        if timed is not None:
            write_whole(timed, signatures, writer, request, notify)
        else:
            write_examples(tokenizer, dataset, signatures, writer, request, trained.dist.device)
        count = writer.finish()
        if not count:
            raise UserError(
                "No example could be read, so no codes were written. `tessera check` shows the "
                "reasons."
            )
        seconds = sum(extent.seconds for extent in writer.extents)
        length = f", {seconds:,.1f} s in all" if writer.extents else ""
        lines.append(
            f"{count} of {len(dataset)} examples encoded in {folder}{length}, vocabulary size "
            f"{tokenizer.vocab_size}"
        )
    return lines


def write_whole(
    files: TimedFiles,
    signatures: list[str],
    writer: TokenWriter,
    request: TokenizeRequest,
    notify: Notify,
) -> None:
    """Write the codes of whole recordings or videos, file by file."""
    indices = range(writer.num_read, len(files.dataset))
    for file in encode_files(files, indices, request.part, request.num_workers):
        notify([file.notice] if file.notice else [])
        entries = []
        if file.codes is not None:
            entry = TokenEntry(file.name, signatures[file.index], file.codes, file.extent)
            entries.append(entry)
        writer.add_entries(entries, num_read=1)


def write_examples(
    tokenizer: MediaTokenizer,
    dataset: ExampleDataset,
    signatures: list[str],
    writer: TokenWriter,
    request: TokenizeRequest,
    device: object,
) -> None:
    """Write the codes of one example of each file, in batches."""
    by_name = {dataset.name(i): signature for i, signature in enumerate(signatures)}
    part, batch_size = DatasetPart(start=writer.num_read), request.batch_size
    for batch, codes in encode_dataset(
        tokenizer, dataset, batch_size, request.num_workers, str(device), part
    ):
        num_read = min(batch_size, len(dataset) - writer.num_read)
        writer.add(batch.names, [by_name[name] for name in batch.names], codes, num_read)


# ---- decode


def find_tokenizer(trained: TrainedRun, codes: Path) -> Tokenizer:
    """Return the tokenizer of a run that wrote a folder of codes."""
    if not (codes / INDEX).is_file():
        inside = sorted(path.parent.name for path in codes.glob(f"*/{INDEX}"))
        if inside:
            raise UserError(
                f"{codes} has no codes, but its folders do: give one of them: {', '.join(inside)}."
            )
    fingerprint = read_fingerprint(codes)
    tokenizers = list(list_tokenizers(trained).values())
    matching = [one for one in tokenizers if one.fingerprint == fingerprint]
    chosen = (matching or tokenizers)[0]
    assert isinstance(chosen, Tokenizer)
    return chosen


def decode_folder(trained: TrainedRun, codes: Path, out: Path, format: str | None) -> int:
    """Write the media of a folder of codes under their own names; return their number."""
    tokenizer = find_tokenizer(trained, codes)
    stored = read_tokens(codes, tokenizer.fingerprint)
    names: OutputNames | None = None
    single: Path | None = None
    for name, pieces in decode_stored(tokenizer, stored):
        first = next(pieces)
        if names is None:
            names = OutputNames(out, getattr(type(first), "suffixes", ()), format)
            single = find_output_file(out, names.suffixes)
            if single is not None:
                check_single(single, len(stored.names), names.format)
        write_media(prepend(first, pieces), single or names.path(name))
    return len(stored.names)


def check_single(file: Path, num_examples: int, format: str | None) -> None:
    """Raise UserError unless one example is to be written, in the format of the file."""
    suffix = file.suffix.lower()
    if num_examples > 1:
        raise UserError(
            f"{file} is the name of a file, but there are {num_examples} examples: use --out "
            f"{file.with_suffix('')} --format {(format or suffix).removeprefix('.')}."
        )
    if format is not None and format != suffix:
        raise UserError(
            f"{file} ends in {file.suffix}, but --format is {format.removeprefix('.')}: leave "
            "--format out, or give a folder as --out."
        )


def prepend(first: Media, others: Iterator[Media]) -> Iterator[Media]:
    yield first
    yield from others


# ---- sample


@dataclass(frozen=True)
class RebuiltFiles:
    names: list[str]
    files: list[str]
    """The files that were written, relative to the folder."""
    pairs: list[Media]
    """The beginning of each original with its reconstruction."""


def find_whole_files(trained: TrainedRun, data: str | None) -> TimedFiles | None:
    """Return the recordings or videos that a tokenizer reconstructs as a whole, if it can."""
    if not isinstance(trained.task, TokenizerTask):
        return None
    tokenizer = Tokenizer(trained)
    timed = find_timed(open_dataset(trained, data), tokenizer)
    return timed if tokenizer.plays_whole_files else None


@runtime_checkable
class PairedMedia(Protocol):
    """Media of which two can be shown side by side."""

    @classmethod
    def side_by_side(cls, left: Media, right: Media) -> Media: ...


def rebuild_files(
    files: TimedFiles,
    *,
    count: int,
    part: TimeRange,
    folder: Path,
    format: str | None,
    notify: Notify,
) -> RebuiltFiles:
    """Reconstruct whole recordings or videos, and write them under their own names."""
    indices = spread_examples(files.dataset, count)
    rebuilt, names = RebuiltFiles([], [], []), None
    for file in encode_files(files, indices, part, keep_original=True):
        notify([file.notice] if file.notice else [])
        if file.codes is None or file.original is None:
            continue
        pieces = files.tokenizer.decode_pieces(file.codes, file.extent)
        first = next(pieces)
        names = names or OutputNames(folder, getattr(type(first), "suffixes", ()), format)
        path = write_media(prepend(first, pieces), names.path(file.name))
        rebuilt.names.append(file.name)
        rebuilt.files.append(path.relative_to(folder).as_posix())
        assert isinstance(first, PairedMedia)
        rebuilt.pairs.append(type(first).side_by_side(file.original, first))
    if not rebuilt.names:
        raise UserError("No example could be read. `tessera check` shows the reasons.")
    return rebuilt

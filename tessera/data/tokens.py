"""Tokenized examples: in memory, and on disk with the fingerprint of their tokenizer.

    tokens/  codes-00000.safetensors ("codes": N x grid, int32 or int64), ..., index.json

Codes of whole recordings and videos have different lengths. Where those of a file differ, "codes"
has the rows of all of its examples one after the other, and "sizes" (N) their lengths. index.json
then also has the extent of each medium: the number of its samples or frames, and their rate.

index.json is written last and makes the folder complete; it has the checksums of all files. Until
then progress.json lists the finished files, from which an interrupted writer continues. Readers
pass the fingerprint of their tokenizer, and codes of another one are rejected, because they would
have no meaning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from tessera.data.dataset import ExampleDataset, Extent
from tessera.run.directory import Json, read_json, write_atomically
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SHARD_SIZE = 4096
"""The number of examples in one file."""
SHARD_SECONDS = 60.0
"""A file is also finished after this time, so that a kill costs at most as much."""
INDEX, PROGRESS = "index.json", "progress.json"


@dataclass
class TokenizedBatch:
    codes: dict[str, Tensor]
    """The codes of each tokenizer by its name, (B, *grid)."""
    captions: list[str]

    def to(self, device: torch.device | str) -> TokenizedBatch:
        from tessera.engine.device import move_tensors

        return move_tensors(self, device)


@dataclass
class TokenizedExample:
    codes: dict[str, Tensor]
    caption: str


@dataclass(frozen=True)
class TokenDataset(ExampleDataset[TokenizedExample]):
    """Tokenized examples: one row of codes for each name and tokenizer."""

    names: list[str]
    codes: dict[str, Tensor]
    captions: list[str]
    """The first caption of each example."""
    captions_by_index: dict[int, list[str]] = field(default_factory=dict)
    """All captions of the examples that have several."""

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def all_captions(self, index: int) -> list[str]:
        return self.captions_by_index.get(index, [self.captions[index]])

    def item(self, index: int, rng: np.random.Generator) -> TokenizedExample:
        codes = {name: codes[index] for name, codes in self.codes.items()}
        return TokenizedExample(codes, self.sample_caption(index, rng))

    def collate(self, examples: list[TokenizedExample]) -> TokenizedBatch:
        return collate(examples)


def collate(examples: list[TokenizedExample]) -> TokenizedBatch:
    codes = {
        name: torch.stack([example.codes[name] for example in examples]).long()
        for name in examples[0].codes
    }
    return TokenizedBatch(codes, [example.caption for example in examples])


@dataclass(frozen=True)
class TokensInfo:
    """The tokenizer that wrote a folder of codes."""

    fingerprint: str
    vocab_size: int
    recipe: str
    steps: int
    preprocessing: dict[str, object]


@dataclass
class StoredTokens:
    """All codes of a folder."""

    names: list[str]
    signatures: list[str]
    """One string for each example that changes when its file does."""
    rows: list[Tensor]
    """The codes of each example."""
    info: TokensInfo
    extents: list[Extent] = field(default_factory=list)
    """How long each medium is, if these are codes of whole recordings or videos."""

    @property
    def codes(self) -> Tensor:
        """The codes of all examples, (N, *grid), with -1 after the end of shorter ones."""
        return stack_padded(self.rows)


def stack_padded(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows of codes; those with a shorter first axis are padded with -1."""
    longest = max(len(row) for row in rows)
    if all(len(row) == longest for row in rows):
        return torch.stack(list(rows))
    padded = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), -1)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


@dataclass(frozen=True)
class TokenEntry:
    """One example of a writer."""

    name: str
    signature: str
    row: Tensor
    extent: Extent | None = None


def write_tokens(
    folder: str | Path, batches: Iterable[tuple[list[str], list[str], Tensor]], info: TokensInfo
) -> int:
    """Write batches of (names, signatures, codes) and return the number of examples.

    Without any example nothing is written.
    """
    writer = TokenWriter(Path(folder), info, source="")
    for names, signatures, codes in batches:
        writer.add(names, signatures, codes, num_read=len(names))
    return writer.finish()


class TokenWriter:
    """Write codes in order; an interrupted writer of the same examples continues where it was.

    Args:
        folder: A new or empty folder, or one that an interrupted writer left.
        info: The tokenizer.
        source: A hash of the examples; "" never continues.
    """

    def __init__(self, folder: Path, info: TokensInfo, source: str):
        self.folder, self.info, self.source = folder, info, source
        self.num_read = 0
        """The number of examples that were read or found to be unreadable."""
        self.names: list[str] = []
        self.signatures: list[str] = []
        self.extents: list[Extent] = []
        self._shards: list[Json] = []
        self._pending: list[TokenEntry] = []
        self._last_time = time.monotonic()
        if (folder / INDEX).exists():
            raise UserError(
                f"{folder} already holds codes. Give another --out; nothing was changed."
            )
        check_tokens_folder(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"The folder {folder} cannot be written ({error.strerror}). Give another --out."
            ) from None
        self._continue()

    def _continue(self) -> None:
        """Take over the files of an interrupted writer, or remove them."""
        progress = read_json(self.folder / PROGRESS)
        expected = {"source": self.source, "fingerprint": self.info.fingerprint}
        is_same = isinstance(progress, dict) and expected.items() <= progress.items()
        if self.source and isinstance(progress, dict) and is_same:
            with contextlib.suppress(OSError, SafetensorError, ValueError, KeyError, TypeError):
                for shard in progress["shards"]:
                    entries = read_shard_entries(self.folder, shard)
                    self.names += entries.names
                    self.signatures += entries.signatures
                    self.extents += entries.extents
                    self._shards.append(shard)
                    self.num_read = shard["num_read"]
        kept = {shard["file"] for shard in self._shards}
        for path in self.folder.glob("codes-*.safetensors"):
            if path.name not in kept:
                path.unlink()

    def add(self, names: list[str], signatures: list[str], codes: Tensor, num_read: int) -> None:
        """Add the readable ones of the next `num_read` examples, with codes (N, *grid)."""
        rows = zip(names, signatures, codes, strict=True) if names else ()
        self.add_entries([TokenEntry(*row) for row in rows], num_read)

    def add_entries(self, entries: Iterable[TokenEntry], num_read: int) -> None:
        """Do the same with codes of any lengths."""
        self.num_read += num_read
        self._pending += entries
        is_full = len(self._pending) >= SHARD_SIZE
        is_late = time.monotonic() > self._last_time + SHARD_SECONDS
        if self._pending and (is_full or is_late):
            self._write_shard()

    def _write_shard(self) -> None:
        dtype = torch.int32 if self.info.vocab_size <= 2**31 else torch.int64
        names = [entry.name for entry in self._pending]
        signatures = [entry.signature for entry in self._pending]
        extents = [entry.extent for entry in self._pending if entry.extent is not None]
        tensors = join_rows([entry.row.to(dtype) for entry in self._pending])
        file = f"codes-{len(self._shards):05d}.safetensors"
        metadata = {
            "names": json.dumps(names),
            "signatures": json.dumps(signatures),
            "extents": json.dumps([astuple(extent) for extent in extents]),
        }
        content = save(tensors, metadata)
        write_atomically(self.folder / file, content)
        self._shards.append(
            {
                "file": file,
                "examples": len(names),
                "num_read": self.num_read,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        )
        self.names += names
        self.signatures += signatures
        self.extents += extents
        self._pending.clear()
        self._last_time = time.monotonic()
        progress = {
            "source": self.source,
            "fingerprint": self.info.fingerprint,
            "shards": self._shards,
        }
        write_atomically(self.folder / PROGRESS, json.dumps(progress, indent=1))

    def finish(self) -> int:
        """Write the index, which makes the folder complete; return the number of examples."""
        if self._pending:
            self._write_shard()
        if not self.names:
            return 0
        index = {
            "names": self.names,
            "signatures": self.signatures,
            "extents": [astuple(extent) for extent in self.extents],
            "shards": self._shards,
            **asdict(self.info),
        }
        write_atomically(self.folder / INDEX, json.dumps(index, indent=1))
        (self.folder / PROGRESS).unlink(missing_ok=True)
        return len(self.names)


def check_tokens_folder(folder: Path) -> None:
    """Raise UserError if a folder has files that no interrupted writer left."""
    if not folder.is_dir():
        return
    ours = ("codes-", PROGRESS, ".codes-", f".{PROGRESS}", f".{INDEX}")
    others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(ours)]
    subfolders = [name for name in others if (folder / name).is_dir()]
    if len(subfolders) < len(others):  # the codes of several tokenizers are in subfolders
        raise UserError(
            f"{folder} has other files, such as {sorted(set(others) - set(subfolders))[0]}. Give "
            "a new or empty folder as --out; nothing was changed."
        )


@dataclass(frozen=True)
class ShardEntries:
    """The examples of a file of codes."""

    names: list[str]
    signatures: list[str]
    extents: list[Extent]


def read_shard_entries(folder: Path, shard: Json) -> ShardEntries:
    """Return the examples of a file of codes, or raise ValueError if it is damaged."""
    path = folder / Path(shard["file"]).name
    check_shard(path, shard)
    with safe_open(path, "numpy") as opened:
        metadata = opened.metadata()
    return ShardEntries(
        json.loads(metadata["names"]),
        json.loads(metadata["signatures"]),
        parse_extents(json.loads(metadata["extents"])),
    )


def parse_extents(values: Iterable[tuple[int, float]]) -> list[Extent]:
    return [Extent(int(length), float(rate_hz)) for length, rate_hz in values]


def join_rows(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are stored: stacked rows, or joined ones with their sizes."""
    if len({row.shape for row in rows}) == 1:
        return {"codes": torch.stack(list(rows))}
    return {"codes": torch.cat(list(rows)), "sizes": torch.tensor([len(row) for row in rows])}


def check_shard(path: Path, shard: Json) -> None:
    """Raise ValueError unless a file has the size and checksum of its entry in the index."""
    with open(path, "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    if (path.stat().st_size, checksum) != (shard["bytes"], shard["sha256"]):
        raise ValueError(f"{path.name} does not match its checksum")


def read_index(folder: str | Path) -> Json:
    index_path = Path(folder) / INDEX
    if not index_path.is_file():
        raise UserError(
            f"There are no codes in {folder}: it has no index.json. `tessera tokenize` writes them."
        )
    try:
        index: Json = json.loads(index_path.read_text(encoding="utf-8"))
        return index
    except (OSError, ValueError, RecursionError) as error:
        raise corrupt_tokens(folder, f"index.json cannot be read: {error}") from None


def read_fingerprint(folder: str | Path) -> str:
    """Return the fingerprint of the tokenizer that wrote the codes in a folder."""
    index = read_index(folder)
    if not isinstance(index, dict) or not isinstance(index.get("fingerprint"), str):
        raise corrupt_tokens(folder, "index.json has no fingerprint")
    return str(index["fingerprint"])


def read_tokens(folder: str | Path, fingerprint: str) -> StoredTokens:
    """Read the codes in a folder if the tokenizer with this fingerprint wrote them."""
    index = read_index(folder)
    try:
        names, signatures = index.pop("names"), index.pop("signatures")
        shards, extents = index.pop("shards"), parse_extents(index.pop("extents"))
        info = TokensInfo(**index)
        fingerprint_found = str(info.fingerprint)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise corrupt_tokens(folder, f"index.json cannot be read: {error}") from None
    if fingerprint_found != fingerprint:
        raise UserError(
            f"The codes in {folder} were written by another tokenizer ({fingerprint_found[:12]}, "
            f"{info.steps} steps) than the requested one ({fingerprint[:12]}). Run `tessera "
            "tokenize` again."
        )
    try:
        rows = [row for shard in shards for row in read_shard(Path(folder), shard)]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise corrupt_tokens(folder, str(error)) from None
    if not len(names) == len(signatures) == len(rows) or len(extents) not in (0, len(rows)):
        raise corrupt_tokens(folder, f"it has {len(names)} names and {len(rows)} rows of codes")
    return StoredTokens(names, signatures, rows, info, extents)


def read_shard(folder: Path, shard: Json) -> Iterator[Tensor]:
    """Yield the codes of each example of a file."""
    path = folder / Path(shard["file"]).name
    check_shard(path, shard)
    tensors = load_file(path)
    codes = tensors["codes"].long()
    sizes = tensors.get("sizes")
    yield from codes if sizes is None else codes.split(sizes.tolist())


def corrupt_tokens(folder: str | Path, problem: str) -> UserError:
    return UserError(
        f"The codes in {folder} are corrupt ({problem}). Run `tessera tokenize` again with another "
        "--out."
    )

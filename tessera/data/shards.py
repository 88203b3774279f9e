"""The examples of tar shards in the WebDataset convention, read by random access.

Members with the same key are one example: a file of the modality, and `txt`, `json` (with the
fields of metadata.jsonl: text or caption, tags) or `cls` as its caption, in this order. Without any
of these in all shards, names of folders are the captions, as in a folder. Examples are in the order
of the shards and of their members, and have the names that they would have in a folder.

The arrays take about 50 bytes for an example and its file name. No torch is imported.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from tessera.data.captions import (
    MetadataRow,
    folder_caption,
    join_lines,
    parse_metadata,
    tags_to_phrases,
)
from tessera.data.collection import NO_CAPTION, FileCollection, RowNames
from tessera.data.discovery import check_unchanged
from tessera.data.errors import UnreadableFile
from tessera.data.files import FilePart, read_range
from tessera.data.shard_index import ShardIndex, load_index
from tessera.run.errors import UserError

CAPTION_SUFFIXES = (".txt", ".json", ".cls")
"""Suffixes of captions, the preferred ones first."""
SOURCES = ("text files", "metadata", "class labels")
NONE = len(SOURCES)
"""The number of an example without a caption member."""
MAX_CAPTION_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Members:
    """The examples of all shards as arrays. N examples."""

    shards: list[tuple[str, int]]
    """The path and the modification time of each shard."""
    folders: list[str]
    folder_captions: list[str]
    """The captions of the folders' files, if names of folders are captions; "" for none."""
    suffixes: list[str]
    text: np.ndarray
    """The file names without folders and suffixes, one after the other, as UTF-8."""
    text_ends_N: np.ndarray
    folder_N: np.ndarray
    suffix_N: np.ndarray
    shard_N: np.ndarray
    offset_N: np.ndarray
    size_N: np.ndarray
    caption_kind_N: np.ndarray
    """The number of the caption's source, or NONE."""
    caption_offset_N: np.ndarray
    caption_size_N: np.ndarray

    def name(self, row: int) -> str:
        start = int(self.text_ends_N[row - 1]) if row else 0
        stem = self.text[start : int(self.text_ends_N[row])].tobytes()
        name = stem.decode("utf-8", "surrogateescape") + self.suffixes[int(self.suffix_N[row])]
        folder = self.folders[int(self.folder_N[row])]
        return f"{folder}/{name}" if folder else name

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))


@dataclass(frozen=True, eq=False)
class ShardFiles(FileCollection):
    members: Members
    rows: np.ndarray
    """The examples of this collection among all."""
    other_members: str = ""
    """Members that are neither files of the modality nor captions, counted by suffix."""
    notices: tuple[str, ...] = ()
    reads_captions: bool = False

    @property
    def names(self) -> RowNames:  # type: ignore[override]
        return RowNames(self.rows, self.members.name)

    def __len__(self) -> int:
        return len(self.rows)

    def file(self, index: int) -> FilePart:
        row = int(self.rows[index])
        members = self.members
        path, modified_ns = members.shards[int(members.shard_N[row])]
        offset, size = int(members.offset_N[row]), int(members.size_N[row])
        return FilePart(path, offset, size, modified_ns, members.name(row))

    def select(self, indices: Iterable[int]) -> Self:
        chosen = np.fromiter(indices, dtype=np.int64)
        return replace(self, rows=self.rows[chosen])

    def with_captions(self) -> Self:
        return replace(self, reads_captions=True)

    def without_captions(self) -> Self:
        return replace(self, reads_captions=False)

    def signature(self, index: int) -> str:
        file = self.file(index)
        return f"{file.size} {file.modified_ns} {file.offset}"

    @cached_property
    def by_folder(self) -> bool:
        """Whether the names of folders are the captions of all shards."""
        has_none = bool((self.members.caption_kind_N == NONE).all())
        return has_none and len(set(self.members.folder_captions) - {""}) >= 2

    def folder_caption(self, row: int) -> str:
        captions = self.members.folder_captions
        return captions[int(self.members.folder_N[row])] if self.by_folder else ""

    def captions(self, index: int, *, lines: bool = False) -> list[str]:
        if not self.reads_captions:
            return []
        row = int(self.rows[index])
        kind = int(self.members.caption_kind_N[row])
        if kind == NONE:
            found = [self.folder_caption(row)]
        elif SOURCES[kind] == "metadata":
            metadata = self.read_metadata(row)
            found = list(metadata.texts) or tags_to_phrases(metadata.tags)
        else:
            text = self.read_caption(row)
            found = text.split("\n") if lines else [text]
        return [caption for one in found if (caption := join_lines(one))]

    def read_metadata(self, row: int) -> MetadataRow:
        """Return the texts and tags in the JSON member of an example."""
        text, origin = self.read_caption(row), self.caption_location(row)
        try:
            return parse_metadata(json.loads(text), origin)
        except (ValueError, RecursionError) as error:
            raise UnreadableFile(f"{origin}: the caption is not JSON ({error})") from None
        except UserError as error:
            raise UnreadableFile(str(error)) from None

    def read_caption(self, row: int) -> str:
        members = self.members
        path, modified_ns = members.shards[int(members.shard_N[row])]
        offset, size = int(members.caption_offset_N[row]), int(members.caption_size_N[row])
        if size > MAX_CAPTION_BYTES:
            raise UnreadableFile(
                f"{self.caption_location(row)}: the caption has {size:,} bytes, and at most "
                f"{MAX_CAPTION_BYTES:,} are read"
            )
        try:
            return read_range(path, modified_ns, offset, size).decode("utf-8-sig")
        except (OSError, UnicodeError) as error:
            raise UnreadableFile(
                f"{self.caption_location(row)}: the caption cannot be read ({error}): save it as "
                "UTF-8 text"
            ) from error

    def caption_location(self, row: int) -> str:
        path = self.members.shards[int(self.members.shard_N[row])][0]
        suffix = CAPTION_SUFFIXES[int(self.members.caption_kind_N[row])]
        return f"{path}/{posixpath.splitext(self.members.name(row))[0]}{suffix}"

    def caption_source(self, index: int) -> str:
        if not self.reads_captions:
            return NO_CAPTION
        row = int(self.rows[index])
        kind = int(self.members.caption_kind_N[row])
        if kind != NONE:
            return SOURCES[kind]
        return "folder names" if self.folder_caption(row) else NO_CAPTION

    def tags(self, index: int) -> tuple[str, ...]:
        row = int(self.rows[index])
        kind = int(self.members.caption_kind_N[row])
        if not self.reads_captions or kind == NONE or SOURCES[kind] != "metadata":
            return ()
        return self.read_metadata(row).tags

    def metadata(self) -> Sequence[Mapping[str, object]]:
        """Return the JSON member of each example; one that cannot be parsed has no fields."""
        return [self.read_fields(int(row)) for row in self.rows]

    def read_fields(self, row: int) -> dict[str, object]:
        kind = int(self.members.caption_kind_N[row])
        if kind == NONE or SOURCES[kind] != "metadata":
            return {}
        try:
            fields = json.loads(self.read_caption(row))
        except (ValueError, RecursionError):
            return {}
        return fields if isinstance(fields, dict) else {}

    def classes(self) -> list[str]:
        if not self.reads_captions:
            return []
        kinds = self.members.caption_kind_N[self.rows]
        if self.by_folder:
            used = np.unique(self.members.folder_N[self.rows])
            return sorted({self.members.folder_captions[i] for i in used} - {""})
        if len(kinds) and (kinds == SOURCES.index("class labels")).all():
            found: set[str] = set()
            for index in range(len(self)):
                found.update(self.captions(index))
            return sorted(found)
        return []

    def describe_unrelated(self) -> str:
        return self.other_members


def find_in_shards(files: Sequence[Path], suffixes: tuple[str, ...], noun: str) -> ShardFiles:
    """Find the files of a modality in shards, whose indexes are made where they are missing."""
    builder, notices = MembersBuilder(), list[str]()
    found, others = Counter[str](), Counter[str]()
    for index in load_indexes(files, notices):
        part = select_members(index, suffixes)
        found.update(index.suffixes[i] for i in index.member_suffix_M)
        others.update(part.other_suffixes)
        notices += part.notices(noun)
        builder.add(part)
    if not builder.num_examples:
        problems = "".join(f"\n{line}" for line in notices[:3])
        raise UserError(
            f"{shards_label(files)} has no {noun}: expected members ending in "
            f"{', '.join(suffixes)}, found {format_counts(found) or 'nothing'}.{problems}"
        )
    members = builder.build()
    rows = np.arange(len(members.offset_N))
    return ShardFiles(members, rows, format_counts(others), tuple(notices))


def load_indexes(files: Sequence[Path], notices: list[str]) -> Iterator[ShardIndex]:
    """Yield the index of every shard; a shard that cannot be opened is noted and left out."""
    for file in files:
        try:
            index, remarks = load_index(file)
        except (OSError, UserError) as error:
            reason = getattr(error, "strerror", None) or error
            notices.append(f"{file}: the shard is left out ({reason}).")
            continue
        check_unchanged(str(file), index.checksum, "shard")
        notices += [*remarks, *index.notices]
        yield index


def shards_label(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1:,} more"


def list_suffixes(files: Sequence[Path]) -> list[str]:
    """Return the suffix of every member of some shards, to detect their modality."""
    return [index.suffixes[i] for index in load_indexes(files, []) for i in index.member_suffix_M]


# ---- examples of one shard


@dataclass(frozen=True, eq=False)
class ShardPart:
    """The examples of one shard: the members of its index that are chosen. N examples."""

    index: ShardIndex
    file_N: np.ndarray
    """The numbers of the members that are read."""
    caption_N: np.ndarray
    """The numbers of the caption members, or -1."""
    kind_N: np.ndarray
    num_repeated: int
    """The number of further members of the same kind under one name, which are not read."""
    first_repeated: tuple[str, str]
    """The names of a member that is read and of another one that is not."""
    other_suffixes: Counter[str]

    def notices(self, noun: str) -> Iterator[str]:
        if self.num_repeated:
            used, unused = self.first_repeated
            yield (
                f"{os.path.basename(self.index.path)}: {self.num_repeated:,} names have two or "
                f"more {noun}, such as {used} and {unused}; {used} is used."
            )


def select_members(index: ShardIndex, suffixes: tuple[str, ...]) -> ShardPart:
    """Choose one file and one caption for each key."""
    files = rank_suffixes(index.suffixes, suffixes)[index.member_suffix_M]
    captions = rank_suffixes(index.suffixes, CAPTION_SUFFIXES)[index.member_suffix_M]
    chosen, rest = best_by_key(index.member_key_M, files, len(suffixes))
    best_caption, _ = best_by_key(index.member_key_M, captions, len(CAPTION_SUFFIXES))
    caption_by_key = np.full(len(index.key_ends_K), -1, dtype=np.int64)
    caption_by_key[index.member_key_M[best_caption]] = best_caption
    caption_N = caption_by_key[index.member_key_M[chosen]]
    kind_N = np.where(caption_N >= 0, captions[caption_N], NONE).astype(np.uint8)
    first = ("", "")
    if len(rest):
        used = chosen[np.searchsorted(index.member_key_M[chosen], index.member_key_M[rest[0]])]
        first = (member_name(index, int(used)), member_name(index, int(rest[0])))
    is_other = (files == len(suffixes)) & (captions == len(CAPTION_SUFFIXES))
    others = Counter(index.suffixes[i] for i in index.member_suffix_M[is_other])
    return ShardPart(index, chosen, caption_N, kind_N, len(rest), first, others)


def rank_suffixes(found: Sequence[str], wanted: tuple[str, ...]) -> np.ndarray:
    """Return the place of each suffix among the wanted ones; their number if it is not wanted.

    Of a suffix such as ".left.png" the end counts.
    """
    ranks = [
        next((rank for rank, one in enumerate(wanted) if suffix.lower().endswith(one)), len(wanted))
        for suffix in found
    ]
    return np.array(ranks, dtype=np.int64)


def best_by_key(key_M: np.ndarray, rank_M: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the best member of each key that has one, in order, and the further ones."""
    wanted = np.flatnonzero(rank_M < limit)
    order = wanted[np.lexsort((wanted, rank_M[wanted], key_M[wanted]))]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = key_M[order[1:]] != key_M[order[:-1]]
    return order[is_first], order[~is_first]


def member_name(index: ShardIndex, member: int) -> str:
    key = int(index.member_key_M[member])
    start = int(index.key_ends_K[key - 1]) if key else 0
    text = index.key_text[start : int(index.key_ends_K[key])].tobytes()
    suffix = index.suffixes[int(index.member_suffix_M[member])]
    folder = index.folders[int(index.key_folder_K[key])]
    return posixpath.join(folder, f"{text.decode('utf-8', 'surrogateescape')}{suffix}")


def format_counts(counts: Counter[str]) -> str:
    """Return the most common suffixes, as in "12 .mp4, 3 .npy"."""
    return ", ".join(f"{n:,} {suffix}" for suffix, n in counts.most_common(5))


# ---- all shards

COLUMNS = {
    "length": "uint32",
    "folder_N": "uint32",
    "suffix_N": "uint16",
    "shard_N": "uint32",
    "offset_N": "int64",
    "size_N": "int64",
    "caption_kind_N": "uint8",
    "caption_offset_N": "int64",
    "caption_size_N": "uint32",
}
"""The type of each array; 47 bytes with the ends of the names."""


class MembersBuilder:
    """Collect the examples of all shards; the indexes themselves are not kept."""

    def __init__(self) -> None:
        self.shards: list[tuple[str, int]] = []
        self.folders: list[tuple[str, str]] = []
        """The names of a shard and of a folder in it."""
        self.suffixes: dict[str, int] = {}
        self.texts: list[np.ndarray] = []
        self.columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
        self.num_examples = 0

    def add(self, part: ShardPart) -> None:
        index, keys = part.index, part.index.member_key_M[part.file_N]
        first_folder = len(self.folders)
        self.folders += [(Path(index.path).stem, folder) for folder in index.folders]
        suffix_numbers = np.array(
            [self.suffixes.setdefault(one, len(self.suffixes)) for one in index.suffixes],
            dtype=np.uint16,
        )
        lengths = np.diff(index.key_ends_K, prepend=0)
        is_used = np.zeros(len(lengths), dtype=bool)
        is_used[keys] = True
        self.texts.append(index.key_text[np.repeat(is_used, lengths)])
        caption_N = np.maximum(part.caption_N, 0)
        new = {
            "length": lengths[keys],
            "folder_N": index.key_folder_K[keys] + first_folder,
            "suffix_N": suffix_numbers[index.member_suffix_M[part.file_N]],
            "shard_N": np.full(len(keys), len(self.shards)),
            "offset_N": index.member_offset_M[part.file_N],
            "size_N": index.member_size_M[part.file_N],
            "caption_kind_N": part.kind_N,
            "caption_offset_N": index.member_offset_M[caption_N],
            "caption_size_N": np.minimum(index.member_size_M[caption_N], 2**32 - 1),
        }
        for name, column in new.items():
            self.columns[name].append(column.astype(COLUMNS[name], copy=False))
        self.shards.append((index.path, index.modified_ns))
        self.num_examples += len(keys)

    def build(self) -> Members:
        """Return the arrays; names begin with those of their shards where two would be equal."""
        joined = {name: np.concatenate(self.columns.pop(name)) for name in list(self.columns)}
        text, self.texts = np.concatenate(self.texts), []
        members = Members(
            self.shards,
            [folder for _, folder in self.folders],
            [folder_caption(f"{folder}/") for _, folder in self.folders],
            list(self.suffixes),
            text,
            np.cumsum(joined.pop("length"), dtype=np.int64),
            **joined,
        )
        if not has_repeated_names(members):
            return members
        prefixed = [f"{shard}/{folder}".rstrip("/") for shard, folder in self.folders]
        return replace(members, folders=prefixed)


def has_repeated_names(members: Members) -> bool:
    """Return whether two shards have an example of the same name."""
    count = len(members.offset_N)
    if len(members.shards) < 2:
        return False
    hashes = np.fromiter((hash(members.name(row)) for row in range(count)), np.int64, count)
    return len(np.unique(hashes)) < count

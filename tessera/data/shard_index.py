"""The index of a tar shard: where each member is, so that any of them can be read at once.

A shard is read once from beginning to end, headers only. The index is a safetensors file beside the
shard (`shards-000.tar.index`), or in the cache where that folder cannot be written. It has the size
and the modification time of its shard and a checksum of its own content, and is made again when one
of them differs. Nothing is ever extracted from a shard.

Members are grouped by their path up to the first dot of the file name, as in WebDataset:
`a/0001.jpg` and `a/0001.txt` have the key `a/0001`, and the suffixes `jpg` and `txt`.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tessera.data.cache import cache_folder
from tessera.run.directory import replacing_file
from tessera.run.errors import UserError

SHARD_SUFFIX = ".tar"
INDEX_SUFFIX = ".tar.index"
FORMAT = "1"
"""The version of the layout of an index."""
BLOCK = tarfile.BLOCKSIZE
MAX_SHOWN = 3
"""The number of members that a notice names."""
_replaced: dict[Path, list[str]] = {}
"""Notices about indexes that this process made: a command opens shards more than once, and its
report may be about a later time than the first."""


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The members of one shard. K keys, M members."""

    path: str
    bytes: int
    modified_ns: int
    key_text: np.ndarray
    """The file names of the keys without folders, one after the other, as UTF-8."""
    key_ends_K: np.ndarray
    key_folder_K: np.ndarray
    """The numbers of the keys' folders."""
    member_key_M: np.ndarray
    member_suffix_M: np.ndarray
    member_offset_M: np.ndarray
    member_size_M: np.ndarray
    folders: list[str]
    suffixes: list[str]
    """Suffixes with the dot."""
    notices: list[str]
    """What cannot be used: the rest of a truncated shard, or members with impossible names."""

    @property
    def checksum(self) -> str:
        """A hash of the names, positions and sizes of all members."""
        return hash_arrays(self.arrays(), [self.folders, self.suffixes])

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in ARRAYS}


ARRAYS = (
    "key_text",
    "key_ends_K",
    "key_folder_K",
    "member_key_M",
    "member_suffix_M",
    "member_offset_M",
    "member_size_M",
)


def hash_arrays(arrays: dict[str, np.ndarray], lists: list[list[str]]) -> str:
    digest = hashlib.blake2b(json.dumps(lists).encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def load_index(path: Path) -> tuple[ShardIndex, list[str]]:
    """Return the index of a shard, made now if there is none that fits, and notices about it."""
    status = path.stat()
    replaced = []
    for file in index_locations(path):
        try:
            return read_index(file, path, status), _replaced.get(path, [])
        except FileNotFoundError:
            continue
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            replaced.append(f"{file} is not the index of {path.name} ({error}): it was made again.")
    index = build_index(path)
    _replaced[path] = replaced + write_index(index)
    return index, _replaced[path]


def index_locations(path: Path) -> list[Path]:
    """Return where the index of a shard may be: beside it, or in the cache."""
    name = hashlib.blake2b(str(path.absolute()).encode(errors="surrogateescape"), digest_size=12)
    return [
        path.with_name(path.name.removesuffix(SHARD_SUFFIX) + INDEX_SUFFIX),
        cache_folder("indexes") / f"{name.hexdigest()}{INDEX_SUFFIX}",
    ]


# ---- reading and writing


def read_index(file: Path, path: Path, status: os.stat_result) -> ShardIndex:
    """Read an index; raise ValueError if it is damaged or does not describe the shard."""
    with safe_open(file, "numpy") as opened:
        stored = opened.metadata() or {}
        if stored.get("format") != FORMAT:
            raise ValueError(f"its format is {stored.get('format')}, expected {FORMAT}")
        found = (int(stored["bytes"]), int(stored["modified_ns"]))
        if found != (status.st_size, status.st_mtime_ns):
            raise ValueError("it describes a file of another size or modification time")
        index = ShardIndex(
            path=str(path),
            bytes=status.st_size,
            modified_ns=status.st_mtime_ns,
            **{name: opened.get_tensor(name) for name in ARRAYS},
            folders=read_texts(stored["folders"]),
            suffixes=read_texts(stored["suffixes"]),
            notices=read_texts(stored["notices"]),
        )
    if index.checksum != stored["checksum"]:
        raise ValueError("its checksum does not match")
    return index


def read_texts(text: str) -> list[str]:
    values = json.loads(text)
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise ValueError("it has no list of texts")
    return values


def write_index(index: ShardIndex) -> list[str]:
    """Write an index beside its shard, or to the cache; return a notice if neither is possible."""
    metadata = {
        "format": FORMAT,
        "bytes": str(index.bytes),
        "modified_ns": str(index.modified_ns),
        "folders": json.dumps(index.folders),
        "suffixes": json.dumps(index.suffixes),
        "notices": json.dumps(index.notices),
        "checksum": index.checksum,
    }
    reason = ""
    for file in index_locations(Path(index.path)):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing_file(file, f".{os.getpid()}") as temporary:
                save_file(index.arrays(), temporary, metadata=metadata)
            return []
        except OSError as error:
            reason = reason or error.strerror or str(error)
    return [f"The index of {index.path} cannot be stored ({reason}): it is made at every start."]


# ---- building


@dataclass
class Members:
    """The members of a shard while it is read."""

    keys: dict[tuple[int, str], int] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    suffixes: dict[str, int] = field(default_factory=dict)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    """The key, suffix, offset and size of each member."""
    unsafe: list[str] = field(default_factory=list)

    def add(self, member: tarfile.TarInfo) -> None:
        name = posixpath.normpath(member.name)
        if posixpath.isabs(member.name) or name.startswith("../") or "\0" in name:
            self.unsafe.append(member.name)
            return
        folder, base = posixpath.split(name)
        stem, dot, suffix = base.partition(".")
        if not stem or not dot:  # hidden files and files without a suffix
            return
        folder_number = self.folders.setdefault(folder, len(self.folders))
        key = self.keys.setdefault((folder_number, unescape(stem)), len(self.keys))
        suffix_number = self.suffixes.setdefault(f".{suffix}", len(self.suffixes))
        self.rows.append((key, suffix_number, member.offset_data, member.size))


def build_index(path: Path) -> ShardIndex:
    """Read the headers of a shard."""
    members, links, damage = Members(), 0, ""
    status = path.stat()
    try:
        with open(path, "rb") as file:
            for member in iterate_members(file):
                if isinstance(member, str):
                    damage = damage or member
                elif member.offset_data + member.size > status.st_size:
                    damage = f"it ends within {member.name}"
                elif member.isreg() and not member.issparse():
                    members.add(member)
                elif not member.isdir():
                    links += 1
    except OSError as error:
        raise UserError(f"The shard {path} cannot be read ({error.strerror or error}).") from None
    texts = [stem.encode("utf-8", "surrogateescape") for _, stem in members.keys]
    rows = np.array(members.rows, dtype=np.int64).reshape(-1, 4)
    return ShardIndex(
        str(path),
        status.st_size,
        status.st_mtime_ns,
        np.frombuffer(b"".join(texts), dtype=np.uint8),
        np.cumsum([len(text) for text in texts], dtype=np.int64),
        np.array([folder for folder, _ in members.keys], dtype=np.uint32),
        rows[:, 0].astype(np.uint32),
        rows[:, 1].astype(np.uint32),
        rows[:, 2].copy(),
        rows[:, 3].copy(),
        list(members.folders),
        list(members.suffixes),
        list(describe_problems(path.name, damage, len(members.rows), links, members.unsafe)),
    )


def iterate_members(file: object) -> Iterator[tarfile.TarInfo | str]:
    """Yield the members of an open archive and, at the end, why it is incomplete if it is.

    tarfile ends silently at a damaged header; a complete archive ends with a block of zeros.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:", errors="surrogateescape") as archive:  # type: ignore[call-overload]
            while (member := archive.next()) is not None:
                yield member
                archive.members = []  # a million of them would fill the memory
            file.seek(archive.offset)  # type: ignore[attr-defined]
            block = file.read(BLOCK)  # type: ignore[attr-defined]
            if not block or block.strip(b"\0"):
                kind = "the rest is damaged" if block else "it is cut short"
                yield f"{kind} at byte {archive.offset:,}"
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        yield f"it is damaged or cut short ({error})"


def describe_problems(
    name: str, damage: str, count: int, links: int, unsafe: list[str]
) -> Iterator[str]:
    if damage:
        yield f"{name}: {damage}; the {count:,} members before are used."
    if links:
        yield f"{name}: {links:,} links, devices and sparse files are left out."
    if unsafe:
        shown = ", ".join(map(repr, unsafe[:MAX_SHOWN]))
        yield f"{name}: {len(unsafe):,} members whose names lead out of it are left out ({shown})."


# ---- names

ESCAPES = {"%": "%25", ".": "%2E"}


def escape(stem: str) -> str:
    """Write a file name without dots, which would end the key of a member."""
    return stem.replace("%", ESCAPES["%"]).replace(".", ESCAPES["."])


def unescape(stem: str) -> str:
    return stem.replace(ESCAPES["."], ".").replace(ESCAPES["%"], "%")

"""The choice of held-out examples by a hash of their names, alone or in groups.

It depends on the name alone, so a folder can grow without moving a held-out file to the training
set. If files of one voice are both trained on and held out, metrics of the held-out set say little
about other voices, so files can be held out together: those of a speaker, a sentence or a
recording. `group_by` of the data selects what a group is:

    file        each file is its own group (the default)
    folder      the files of a folder
    prefix      the part of a file name before the first "-", "_" or ".", whatever its folder
    COLUMN      a field of the metadata, such as speaker: a column of metadata.jsonl,
                metadata.csv or a table, or a field of the JSON files in shards

No torch is imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import posixpath
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.data.collection import FileCollection
from tessera.run.errors import UserError

BY_NAME = ("file", "folder", "prefix")
CAPTION_COLUMNS = {"file_name", "text", "caption", "tags"}
MAX_SHOWN = 5


def split_names(
    names: Sequence[str], val_fraction: float, seed: int = 0
) -> tuple[array[int], array[int]]:
    """Return the indices of the training set and of the held-out set.

    Equal names, as those of groups, are on the same side. Where the hash leaves a side empty, as in
    a folder of a few files, the file with the lowest hash is held out or the one with the highest
    is trained on. With a fraction of 0, or a single name, both sets contain everything.
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction must be at least 0 and below 1, got {val_fraction}.")
    # Arrays: a list of a million numbers takes 40 MB, of which Python returns nothing when freed.
    hashes = np.fromiter((hash_name(name, seed) for name in names), np.float64, len(names))
    if val_fraction == 0 or not len(names) or hashes.min() == hashes.max():
        indices = array("q", range(len(names)))
        return indices, indices
    is_held_out = hashes < val_fraction
    if not is_held_out.any():
        is_held_out = hashes == hashes.min()
    if is_held_out.all():
        is_held_out = hashes < hashes.max()
    train, held_out = (np.flatnonzero(one).astype("q") for one in (~is_held_out, is_held_out))
    return array("q", train.tobytes()), array("q", held_out.tobytes())


def release_freed_memory() -> None:
    """Return memory that was freed to the system, which glibc keeps for itself.

    After a list of files was read and split, that was half of what the process had taken for it.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def hash_name(name: str, seed: int = 0) -> float:
    """Hash a name to [0, 1); accents are normalised, since file systems differ in their form."""
    normalised = unicodedata.normalize("NFC", name).encode("utf-8", "surrogateescape")
    salt = seed.to_bytes(8, "big", signed=True)
    digest = hashlib.blake2b(normalised, digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "big") / 2**64


# ---- groups


def group_names(files: FileCollection, group_by: str) -> Sequence[str]:
    """Return the group of each file; raise UserError if there is one group only."""
    groups = read_groups(files, group_by, "--data.group-by")
    if len(set(groups)) < 2 and len(files.names) > 1:
        raise UserError(
            f"All {len(files.names):,} files are in one group by {group_by}, so none can be held "
            "out: use another --data.group-by, or --data.val-fraction 0 to validate on the "
            "training files."
        )
    return groups


def read_groups(files: FileCollection, group_by: str, flag: str) -> Sequence[str]:
    """Return the group of each file; `flag` is named in errors."""
    names = files.names
    if group_by == "file":
        return names
    if group_by == "folder":
        return [posixpath.dirname(name) or "." for name in names]
    if group_by == "prefix":
        return [re.split(r"[-_.]", posixpath.basename(name))[0] for name in names]
    return read_column(files, group_by, flag)


def read_column(files: FileCollection, column: str, flag: str) -> list[str]:
    """Return the value of a field of the metadata for each file."""
    found = [fields.get(column) for fields in files.metadata()]
    missing = [name for name, value in zip(files.names, found, strict=True) if value is None]
    if len(missing) == len(files):
        known = ", ".join([*BY_NAME, *list_columns(files)])
        raise UserError(
            f"{flag} is {column!r}, but no file has such a field in its metadata: use one of "
            f"{known}."
        )
    if missing:
        raise UserError(
            f"{flag} is {column!r}, but {len(missing):,} of {len(files):,} files have no such "
            f"value in the metadata, for example {missing[0]}: add it, or remove the files."
        )
    return [str(value) for value in found]


def list_columns(files: FileCollection) -> list[str]:
    """Return the fields of the metadata that are no captions."""
    columns = {column for fields in files.metadata() for column in fields}
    return sorted(columns - CAPTION_COLUMNS)


@dataclass(frozen=True)
class GroupReport:
    """How a folder is split into training set and held-out set."""

    group_by: str
    groups: int
    held_out_groups: list[str]
    files: int
    held_out_files: int

    def line(self) -> str:
        names = ", ".join(self.held_out_groups[:MAX_SHOWN])
        more = len(self.held_out_groups) - MAX_SHOWN
        shown = f"{names} and {more:,} more" if more > 0 else names
        return (
            f"split by {self.group_by}: {self.groups:,} groups, {len(self.held_out_groups):,} held "
            f"out ({shown}) with {self.held_out_files:,} of {self.files:,} files"
        )


def report_groups(
    files: FileCollection, group_by: str, val_fraction: float, seed: int
) -> GroupReport:
    """Return which groups are held out."""
    groups = group_names(files, group_by)
    _, held_out = split_names(groups, val_fraction, seed)
    held_out_groups = sorted({groups[index] for index in held_out})
    return GroupReport(group_by, len(set(groups)), held_out_groups, len(files), len(held_out))


def find_groupings(files: FileCollection) -> dict[str, int]:
    """Return the ways of grouping files that give several groups of several files."""
    found: dict[str, int] = {}
    for group_by in ("folder", "prefix", *list_columns(files)):
        try:
            sizes = Counter(group_names(files, group_by))
        except UserError:
            continue
        if 2 <= len(sizes) <= len(files) / 2:
            found[group_by] = len(sizes)
    return found

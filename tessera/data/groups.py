"""Groups of files that are held out together: those of a speaker, a sentence or a recording.

If files of one voice are both trained on and held out, metrics of the held-out set say little about
other voices. `group_by` of the data selects what a group is:

    file        each file is its own group (the default)
    folder      the files of a folder
    prefix      the part of a file name before the first "-", "_" or ".", whatever its folder
    COLUMN      a column of metadata.jsonl or metadata.csv, such as speaker

No torch is imported.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.data.captions import (
    METADATA,
    MetadataLine,
    get_file_name,
    read_csv,
    read_jsonl,
)
from tessera.data.discovery import list_fixed_files
from tessera.data.split import split_names
from tessera.run.errors import UserError

BY_NAME = ("file", "folder", "prefix")
CAPTION_COLUMNS = {"file_name", "text", "caption", "tags"}
MAX_SHOWN = 5


def group_names(root: str | Path, names: Sequence[str], group_by: str) -> list[str]:
    """Return the group of each file."""
    if group_by == "file":
        return list(names)
    if group_by == "folder":
        groups = [posixpath.dirname(name) or "." for name in names]
    elif group_by == "prefix":
        groups = [re.split(r"[-_.]", posixpath.basename(name))[0] for name in names]
    else:
        groups = read_column(Path(root), names, group_by)
    if len(set(groups)) < 2 and len(names) > 1:
        raise UserError(
            f"All {len(names):,} files of {root} are in one group by {group_by}, so none can be "
            "held out: use another --data.group-by, or --data.val-fraction 0 to validate on the "
            "training files."
        )
    return groups


def read_column(root: Path, names: Sequence[str], column: str) -> list[str]:
    """Return the value of a column of the metadata for each file."""
    values = {
        name: str(line.fields[column])
        for name, line in read_lines_by_name(root)
        if column in line.fields
    }
    missing = [name for name in names if name not in values]
    if len(missing) == len(names):
        known = ", ".join([*BY_NAME, *list_columns(root)])
        raise UserError(
            f"--data.group-by is {column!r}, but no metadata.jsonl or metadata.csv in {root} has "
            f"such a column: use one of {known}."
        )
    if missing:
        raise UserError(
            f"--data.group-by is {column!r}, but {len(missing):,} of {len(names):,} files have no "
            f"such value in the metadata, for example {missing[0]}: add it, or remove the files."
        )
    return [values[name] for name in names]


def read_lines_by_name(root: Path) -> Iterator[tuple[str, MetadataLine]]:
    """Yield the name of each file in the metadata of a folder, with its line."""
    files = list_fixed_files(root) if root.is_dir() else []
    for file in (one for one in files if posixpath.basename(one) in METADATA):
        read = read_jsonl if file.endswith(".jsonl") else read_csv
        for line in read(root / file):
            name = get_file_name(line, f"{root / file}, line {line.number}")
            yield posixpath.normpath(posixpath.join(posixpath.dirname(file), name)), line


def list_columns(root: Path) -> list[str]:
    """Return the columns of the metadata that are no captions."""
    columns = {column for _, line in read_lines_by_name(root) for column in line.fields}
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
    root: Path, names: Sequence[str], group_by: str, val_fraction: float, seed: int
) -> GroupReport:
    """Return which groups are held out."""
    groups = group_names(root, names, group_by)
    _, held_out = split_names(groups, val_fraction, seed)
    held_out_groups = sorted({groups[index] for index in held_out})
    return GroupReport(group_by, len(set(groups)), held_out_groups, len(names), len(held_out))


def find_groupings(root: Path, names: Sequence[str]) -> dict[str, int]:
    """Return the ways of grouping files that give several groups of several files."""
    found: dict[str, int] = {}
    for group_by in ("folder", "prefix", *list_columns(root)):
        try:
            sizes = Counter(group_names(root, names, group_by))
        except UserError:
            continue
        if 2 <= len(sizes) <= len(names) / 2:
            found[group_by] = len(sizes)
    return found

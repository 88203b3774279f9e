"""What stays as it is while a file does, so that a change is noticed without opening the file."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class State:
    """What stays as it is while a file does, or a folder and its frames."""

    path: str
    bytes: int
    changed_ns: int


def state_of(path: str | Path) -> State:
    """One question to the file system for a file, which may be one of a million; and one more for each frame of a folder."""
    about = Path(path).stat()
    inside = [file.stat() for file in Path(path).iterdir()] if stat.S_ISDIR(about.st_mode) else []
    everything = [about, *inside]
    return State(str(path), sum(each.st_size for each in everything), max(each.st_mtime_ns for each in everything))

"""Find run directories and search indexes below some folders.

A run is known to the page by its id, the path below a given folder. Requests name ids, which are
looked up among the runs that were found: no path of a request is ever opened as such.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from tessera.run.directory import Json, RunDirectory
from tessera.view.runs import FoundRun, Summary

MAX_DEPTH = 4
"""How far below a given folder runs are searched."""
INDEX_FILES = ("index.json", "embeddings.safetensors")
RUN_PARTS = ("config.json", "metrics.jsonl", "checkpoints")
READ_NAMES = (
    "config.json metrics.jsonl README.md evaluation.json classes.json alarms.jsonl "
    "nonfinite.jsonl rejected.jsonl samples checkpoints dependencies cache lock"
).split()
"""What is read of a run."""


class RunLibrary:
    """The runs and indexes below the given folders."""

    def __init__(self, folders: list[Path]):
        self.folders = [folder.absolute() for folder in folders]
        self.roots = [folder.resolve() for folder in folders]
        self._known: dict[str, FoundRun] = {}

    # ---- finding

    def find(self) -> dict[str, FoundRun]:
        """Return all runs by id; what was read of known ones is kept."""
        found: dict[str, FoundRun] = {}
        for folder in self.folders:
            prefix = f"{folder.name}/" if len(self.folders) > 1 else ""
            for path, reason in find_runs(folder):
                relative = path.relative_to(folder).as_posix()
                run_id = prefix + (relative if relative != "." else folder.name)
                known = self._known.get(run_id)
                reason = reason or self.find_outside(path)
                if known is None or known.path != path or known.reason != reason:
                    known = FoundRun(run_id, RunDirectory(path), reason)
                found[run_id] = known
        self._known = found
        return found

    def get(self, run_id: str) -> FoundRun:
        """Return a run by its id, or raise KeyError."""
        if run_id not in self._known:
            self.find()
        return self._known[run_id]

    def find_outside(self, run: Path) -> str:
        """Return a reason if a link leads from a run to files outside of the given folders."""
        for path in (run, *(run / name for name in READ_NAMES)):
            if (path.is_symlink() or path == run) and not self.contains(path):
                return f"{path.name} is a link to a place outside of the folders that are shown."
        return ""

    def contains(self, path: Path) -> bool:
        """Return whether a path, with all links resolved, is inside of the given folders."""
        resolved = path.resolve()
        return any(resolved.is_relative_to(root) for root in self.roots)

    def indexes(self) -> list[Json]:
        """Return the search indexes that `tessera index` wrote below the given folders."""
        found = []
        for folder in self.folders:
            for path in walk(folder, depth=MAX_DEPTH + 2):
                if all((path / name).is_file() for name in INDEX_FILES) and self.contains(path):
                    shown = path.relative_to(folder).as_posix()
                    found.append({"path": str(path), "name": shown, **describe_index(path)})
        return found

    # ---- the table

    def summaries(self) -> list[Summary]:
        rows = [run.summarize() for run in self.find().values()]
        by_path = {Path(row.path).resolve(): row.id for row in rows}
        linked = []
        for row in rows:
            depends_on = {
                name: found
                for name, given in (row.info.dependencies if row.info else {}).items()
                if (found := match_path(given, Path(row.path), by_path))
            }
            linked.append(Summary(**(vars(row) | {"depends_on": depends_on})))
        return linked


def match_path(given: str, run: Path, by_path: dict[Path, str]) -> str | None:
    """Return the id of the run at a path that was relative to an unknown folder.

    The folder is most likely one above the run itself.
    """
    for base in (Path(), *run.resolve().parents):
        found = by_path.get((base / given).resolve())
        if found is not None:
            return found
    return None


def find_runs(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield run directories with the reason why one is unusable, in the order of their names."""
    if not folder.is_dir():
        yield folder, "The folder does not exist."
        return
    if looks_like_run(folder):
        yield folder, ""
        return
    for entry in list_folders(folder):
        if looks_like_index(entry):
            continue
        inside = list(find_runs_below(entry, MAX_DEPTH - 1))
        if inside:
            yield from ((path, "") for path in inside)
        else:
            yield entry, "It is not a run: it has no config.json, no metrics and no checkpoints."


def find_runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if looks_like_run(folder):
        yield folder
    elif depth and not looks_like_index(folder):
        for entry in list_folders(folder):
            yield from find_runs_below(entry, depth - 1)


def looks_like_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_PARTS)


def looks_like_index(folder: Path) -> bool:
    return all((folder / name).is_file() for name in INDEX_FILES)


def list_folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if one.is_dir() and not one.name.startswith(".")]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def walk(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth:
        for entry in list_folders(folder):
            if not entry.is_symlink() and entry.name not in ("samples", "checkpoints"):
                yield from walk(entry, depth - 1)


def describe_index(path: Path) -> Json:
    try:
        content = json.loads((path / INDEX_FILES[0]).read_text(encoding="utf-8"))
        return {"examples": len(content["names"]), "data": str(content["data"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"examples": 0, "data": "unreadable"}

"""The files of the playground: uploads and samples, kept in the directory of their run.

The files of a run that cannot be written are kept in a temporary folder until the server stops.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from tessera.run.directory import next_free_folder
from tessera.view.library import RunLibrary
from tessera.view.runs import FoundRun

INPUTS = "inputs"
"""The folder of uploads among the samples of a run."""


class Storage:
    def __init__(self, library: RunLibrary):
        self.library = library
        self.temporary = Path(tempfile.mkdtemp(prefix="tessera-view-"))

    def close(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)

    def is_kept(self, run: FoundRun) -> bool:
        """Return whether files can be kept in the directory of a run."""
        return can_write(run.directory.samples)

    def folder_of(self, run: FoundRun) -> Path:
        """Return the folder for uploads and samples."""
        return run.directory.samples if self.is_kept(run) else self.temporary_of(run)

    def temporary_of(self, run: FoundRun) -> Path:
        return self.temporary / run.id.replace("/", "_")

    def find(self, run: FoundRun, folder: str, name: str) -> Path | None:
        """Return the path of a file, which cannot be outside of the given folders; None if there
        is no such file."""
        is_plain = all(
            part and part not in (".", "..") and not {"/", "\\", "\0"} & set(part)
            for part in (folder, *name.split("/"))
        )
        if not is_plain:
            return None
        for base in (run.directory.samples, self.temporary_of(run)):
            path = base / folder / name
            is_inside = self.library.contains(path) or path.resolve().is_relative_to(
                self.temporary.resolve()
            )
            if is_inside and path.is_file():
                return path
        return None

    def new_folder(self, run: FoundRun, command: str) -> Path:
        """Create the folder of a job, so that no other job takes its name."""
        base, name = self.folder_of(run), "by-hand"
        if command == "index":
            base, name = (run.directory.cache if self.is_kept(run) else base), "index"
        base.mkdir(parents=True, exist_ok=True)
        while True:  # another request may take the same name meanwhile
            folder = next_free_folder(base, name)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder


def can_write(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


def shown_path(path: Path) -> str:
    """Return a path relative to the working directory if it is below it, for commands to copy."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)

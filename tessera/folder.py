"""A run's folder: its config, its numbers, its samples, its checkpoints' place, and the lock that keeps a second run out.

Imports no torch: the viewer and the quick verbs read folders too. Everything is written so that a kill at any instant
leaves either the old state or the new one.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Refused(Exception):
    """Something a person asked for cannot be done; the message is a letter to that person."""

    exit_code = 2


def write_atomically(path: Path, text: str) -> None:
    """The file is the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.writing")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Makes renames inside `path` last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunFolder:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self.card = self.path / "README.md"
        self._lock: int | None = None
        self._unwritten: list[str] = []

    # ---- opening and closing

    def make(self) -> None:
        """Creates the folder and what lies in it, or says why it cannot."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.samples.mkdir(exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise Refused(f"{self.path} cannot be a run's folder: {error.filename} is a file. Give another --out.") from None
        except OSError as error:
            raise Refused(f"The run's folder {self.path} cannot be written ({error.strerror}). Give another --out.") from None

    def lock(self) -> None:
        """Keeps a second run out of this folder for as long as this process lives.

        A POSIX record lock: it goes with the process, however that dies, and unlike flock it is not inherited by
        loader workers that may outlive a killed run by some seconds.
        """
        if self._lock is not None:
            return
        path = self.path / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise Refused(f"The run's folder {self.path} cannot be written ({error.strerror}). Give another --out.") from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise Refused(
                f"Another run is at work in {self.path} (process {holder or 'unknown'}). "
                "Wait for it, stop it, or give another --out."
            ) from None
        os.truncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- the configuration

    def read_config(self) -> dict[str, Any]:
        if not self.path.is_dir():
            raise Refused(f"There is no run in {self.path}: no such folder.")
        if not self.config.is_file():
            raise Refused(f"There is no run in {self.path}: it has no config.json.")
        try:
            return json.loads(self.config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise Refused(f"{self.config} is not readable as JSON: {error}.") from None

    def write_config(self, config: dict[str, Any]) -> None:
        write_atomically(self.config, json.dumps(config, indent=2) + "\n")

    # ---- the numbers

    def log(self, record: dict[str, Any]) -> bool:
        """Appends one line. A line that a full disk refuses is kept and written with the next; False says so."""
        self._unwritten.append(json.dumps({key: _plain(value) for key, value in record.items()}) + "\n")
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                start = file.tell()
                try:
                    file.write("".join(self._unwritten))
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(start)
                    raise
        except OSError:
            return False
        self._unwritten.clear()
        return True

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a line torn by a kill is no line."""
        if not self.metrics.exists():
            return []
        found = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            if kind is not None and f'"{kind}"' not in line:
                continue  # a month's worth of lines is not parsed to find a few
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if kind is None or record.get("kind") == kind:
                found.append(record)
        return found

    def forget_after(self, step: int) -> None:
        """Drops the lines of steps that a resumed run will do again, so that no step appears twice."""
        if self.metrics.exists():
            kept = [record for record in self.records() if record["step"] <= step]
            write_atomically(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    def note(self, file_name: str, record: dict[str, Any]) -> None:
        """Adds a line to one of the run's smaller journals (rejected examples, non-finite steps, alarms)."""
        try:
            with open(self.path / file_name, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError:
            return

    def noted(self, file_name: str) -> list[dict[str, Any]]:
        path = self.path / file_name
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    # ---- the samples

    @contextmanager
    def writing_samples(self, name: str) -> Iterator[Path]:
        """A folder under samples/ that appears whole or not at all."""
        final, temporary = self.samples / name, self.samples / f".{name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            if final.exists():  # from a life of this run that was cut short after it wrote them
                shutil.rmtree(final)
            os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _plain(value: Any) -> Any:
    """JSON has no NaN; a reader in another language must not stumble over ours."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

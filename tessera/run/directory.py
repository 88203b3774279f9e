"""A run's folder: its config, its numbers, its samples, its checkpoints' place, and the lock that
keeps a second run out.

Imports no torch: the viewer and the quick verbs read folders too. Everything is written so that a
kill at any instant leaves either the old state or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EARLIER = "earlier"


def for_samples(place: Path) -> Path:
    """A place that samples may be written to: a new folder, an empty one, or one that holds earlier
    samples."""
    if place.exists() and (
        not place.is_dir() or (lying_in(place) and not (place / "settings.json").exists())
    ):
        raise UserError(
            f"{place} holds other things than samples. Give another --out; nothing was changed."
        )
    return place


def set_aside(place: Path) -> Path | None:
    """Earlier samples move into a folder of their own: two sets in one would be neither."""
    earlier = lying_in(place)
    if not earlier:
        return None
    aside = next_free(place, EARLIER)
    aside.mkdir()
    for path in earlier:
        path.rename(aside / path.name)
    return aside


def lying_in(place: Path) -> list[Path]:
    """What has not been set aside."""
    return [path for path in place.iterdir() if not path.name.startswith(f"{EARLIER}-")]


def next_free(folder: Path, name: str) -> Path:
    number = 1
    while (folder / f"{name}-{number:03d}").exists():
        number += 1
    return folder / f"{name}-{number:03d}"


class UserError(Exception):
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


def append(path: Path, text: str) -> None:
    """The whole text is added to the file, or none of it: what a full disk took in part is taken
    back.

    Unbuffered, because a buffer would try to write its rest once more when the file is truncated or
    closed.
    """
    data = text.encode("utf-8")
    with open(path, "ab", buffering=0) as file:
        start = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(start)
            raise


def fsync_folder(path: Path) -> None:
    """Makes renames inside `path` last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunDirectory:
    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self.parts = self.path / "parts"
        self.cache = self.path / "cache"
        self.card = self.path / "README.md"
        self._lock: int | None = None
        self._unwritten: list[str] = []

    @property
    def begun(self) -> bool:
        """Whether there is anything that a step has left."""
        return self.metrics.exists() or any(
            any(place.iterdir()) for place in (self.checkpoints, self.samples)
        )

    # ---- opening and closing

    def make(self) -> None:
        """Creates the folder and what lies in it, or says why it cannot."""
        for place in (self.samples, self.checkpoints, *self.checkpoints.parents):
            if place.is_file():
                raise UserError(
                    f"{self.path} cannot be a run's folder: {place} is a file. Give another --out."
                )
        with self._told_if_not_writable():
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.samples.mkdir(exist_ok=True)

    @contextmanager
    def _told_if_not_writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"The run's folder {self.path} cannot be written ({error.strerror}). Make room, or give another --out."
            ) from None

    def lock(self) -> None:
        """Keeps a second run out of this folder for as long as this process lives.

        A POSIX record lock: it goes with the process, however that dies, and unlike flock it is not
        inherited by loader workers that may outlive a killed run by some seconds.
        """
        if self._lock is not None:
            return
        path = self.path / "lock"
        with self._told_if_not_writable():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"Another run is at work in {self.path} (process {holder or 'unknown'}). "
                "Wait for it, stop it, or give another --out."
            ) from None
        self._lock = descriptor
        with self._told_if_not_writable():
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- the configuration

    def read_config(self) -> dict[str, Any]:
        if not self.path.is_dir():
            raise UserError(f"There is no run in {self.path}: no such folder.")
        if not self.config.is_file():
            raise UserError(f"There is no run in {self.path}: it has no config.json.")
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{self.config} is not readable as JSON: {error}.") from None
        if not isinstance(config, dict):
            raise UserError(
                f"{self.config} must hold a group of settings, but it holds {config!r}."
            )
        return config

    def write_config(self, config: dict[str, Any]) -> None:
        with self._told_if_not_writable():
            write_atomically(self.config, json.dumps(config, indent=2) + "\n")

    # ---- the numbers

    def log(self, record: dict[str, Any]) -> bool:
        """Appends one line. A line that a full disk refuses is kept and written with the next;
        False says so."""
        self._unwritten.append(
            json.dumps({key: _plain(value) for key, value in record.items()}) + "\n"
        )
        try:
            append(self.metrics, "".join(self._unwritten))
        except OSError:
            return False
        self._unwritten.clear()
        return True

    def fsync_metrics(self) -> None:
        """Before a checkpoint: what was logged up to it survives a power cut too. A kill alone
        takes no written line."""
        if self.metrics.exists():
            with open(self.metrics, "rb") as file:
                os.fsync(file.fileno())

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, and those that wait for room on the disk."""
        lines = [*_lines(self.metrics), *self._unwritten]
        if kind is None:
            return _parsed(lines)
        likely = [
            line for line in lines if f'"{kind}"' in line
        ]  # a month's worth is not parsed to find a few
        return [record for record in _parsed(likely) if record.get("kind") == kind]

    def forget_after(self, step: int) -> None:
        """Drops the lines of steps that a resumed run will do again, so that no step appears
        twice."""
        if self.metrics.exists():
            kept = [record for record in self.records() if record["step"] <= step]
            with self._told_if_not_writable():
                write_atomically(
                    self.metrics, "".join(json.dumps(record) + "\n" for record in kept)
                )
            self._unwritten.clear()

    def note(self, file_name: str, record: dict[str, Any]) -> None:
        """Adds a line to one of the run's smaller journals (rejected examples, non-finite steps,
        alarms)."""
        with contextlib.suppress(OSError):
            append(self.path / file_name, json.dumps(record) + "\n")

    def noted(self, file_name: str) -> list[dict[str, Any]]:
        return _parsed(_lines(self.path / file_name))

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


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _parsed(lines: list[str]) -> list[Any]:
    """The records of JSON lines; a line torn by a kill is no line."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _plain(value: Any) -> Any:
    """JSON has no NaN; a reader in another language must not stumble over ours."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

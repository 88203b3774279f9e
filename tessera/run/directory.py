"""The run directory: configuration, metrics, samples, checkpoints, and the lock.

It imports no torch, so that commands that only read run directories start quickly. Every write
leaves either the old state or the new one if the process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.run.errors import UserError

Json = dict[str, Any]
"""A JSON object."""

CLASSES = "classes.json"
"""The class names of a run whose captions are names of folders."""


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that it holds the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.writing")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def append_text(path: Path, text: str) -> None:
    """Append the whole text or nothing: a partial write on a full disk is truncated.

    The file is unbuffered, because a buffer would write its rest when the file is closed.
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
    """Flush renames inside a folder to the disk."""
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
        self.dependencies = self.path / "dependencies"
        self.cache = self.path / "cache"
        self.card = self.path / "README.md"
        self._lock: int | None = None
        self._unwritten: list[str] = []

    @property
    def has_started(self) -> bool:
        """Whether any step has left metrics, checkpoints or samples."""
        folders = (self.checkpoints, self.samples)
        return self.metrics.exists() or any(any(folder.iterdir()) for folder in folders)

    # ---- creating and locking

    def create(self) -> None:
        for place in (self.samples, self.checkpoints, *self.checkpoints.parents):
            if place.is_file():
                raise UserError(
                    f"{self.path} cannot be a run directory: {place} is a file. Give another --out."
                )
        with self._explain_write_errors():
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.samples.mkdir(exist_ok=True)

    @contextmanager
    def _explain_write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"The run directory {self.path} cannot be written ({error.strerror}). Free some "
                "disk space, or give another --out."
            ) from None

    def lock(self) -> None:
        """Prevent other runs from using this directory while this process is alive.

        This is a POSIX record lock: it ends with the process, however that ends, and unlike flock
        it is not inherited by data loading workers, which may outlive a killed run by some seconds.
        """
        if self._lock is not None:
            return
        with self._explain_write_errors():
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise UserError(
                f"Another run uses {self.path} (process {holder or 'unknown'}). Wait for it, stop "
                "it, or give another --out."
            ) from None
        self._lock = descriptor
        with self._explain_write_errors():
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())

    def is_locked(self) -> bool:
        """Return whether another process holds the lock; the run is not disturbed by the question.

        The process that holds the lock must not ask: closing the file would release it.
        """
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY)
        except OSError:
            return False
        is_mac = sys.platform == "darwin"  # where the fields have another order
        layout, index = ("@qqihh", 3) if is_mac else ("@hhqqi", 0)
        fields = [0] * 5
        fields[index] = fcntl.F_WRLCK
        try:
            found = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(layout, *fields))
            return struct.unpack(layout, found)[index] != fcntl.F_UNLCK
        except OSError:  # a file system without locks
            return False
        finally:
            os.close(descriptor)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- configuration

    def read_config(self) -> Json:
        if not self.path.is_dir():
            raise UserError(f"There is no run in {self.path}: the folder does not exist.")
        if not self.config.is_file():
            raise UserError(f"There is no run in {self.path}: it has no config.json.")
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{self.config} is not valid JSON: {error}.") from None
        if not isinstance(config, dict):
            raise UserError(f"{self.config} must hold a JSON object, got {config!r}.")
        return config

    def write_config(self, config: Json) -> None:
        with self._explain_write_errors():
            write_atomically(self.config, json.dumps(config, indent=2) + "\n")

    def read_classes(self) -> list[str]:
        """Return the class names if the run was trained on them, else nothing."""
        file = self.path / CLASSES
        return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []

    # ---- metrics

    def log(self, record: Json) -> bool:
        """Append one line; on a full disk keep it for the next call and return False."""
        # JSON has no NaN, and readers in other languages fail on it.
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._unwritten.append(json.dumps(plain) + "\n")
        try:
            append_text(self.metrics, "".join(self._unwritten))
        except OSError:
            return False
        self._unwritten.clear()
        return True

    def fsync_metrics(self) -> None:
        """Flush logged lines to the disk before a checkpoint, so that they survive a power cut."""
        if self.metrics.exists():
            with open(self.metrics, "rb") as file:
                os.fsync(file.fileno())

    def read_records(self, kind: str | None = None) -> list[Json]:
        """Return the records of metrics.jsonl, including those not yet written."""
        lines = [*read_lines(self.metrics), *self._unwritten]
        if kind is None:
            return parse_lines(lines)
        likely = [line for line in lines if f'"{kind}"' in line]  # parse only what can match
        return [record for record in parse_lines(likely) if record.get("kind") == kind]

    def truncate_after(self, step: int) -> None:
        """Remove the records of later steps, which a resumed run logs again."""
        if self.metrics.exists():
            kept = [record for record in self.read_records() if record["step"] <= step]
            with self._explain_write_errors():
                text = "".join(json.dumps(record) + "\n" for record in kept)
                write_atomically(self.metrics, text)
            self._unwritten.clear()

    def note(self, file_name: str, record: Json) -> None:
        """Append a line to a file of skipped examples, non-finite steps or alarms."""
        with contextlib.suppress(OSError):
            append_text(self.path / file_name, json.dumps(record) + "\n")

    def read_notes(self, file_name: str) -> list[Json]:
        return parse_lines(read_lines(self.path / file_name))

    # ---- samples

    @contextmanager
    def writing_samples(self, name: str) -> Iterator[Path]:
        """Yield a temporary folder that becomes samples/NAME when the context ends."""
        final, temporary = self.samples / name, self.samples / f".{name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            if final.exists():  # from an earlier attempt at this step
                shutil.rmtree(final)
            os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def read_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def parse_lines(lines: list[str]) -> list[Json]:
    """Parse JSON lines; a line that a kill cut short is ignored."""
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


# ---- folders for the samples of a command

EARLIER = "earlier"


def check_sample_folder(folder: Path) -> Path:
    """Return a folder that samples may be written to: new, empty, or with earlier samples."""
    is_taken = folder.exists() and (
        not folder.is_dir() or (list_samples(folder) and not (folder / "settings.json").exists())
    )
    if is_taken:
        raise UserError(f"{folder} holds files that are not samples. Give another --out.")
    return folder


def move_earlier_samples(folder: Path) -> Path | None:
    """Move earlier samples into a subfolder, so that two sets are never mixed; return it."""
    earlier = list_samples(folder)
    if not earlier:
        return None
    subfolder = next_free_folder(folder, EARLIER)
    subfolder.mkdir()
    for path in earlier:
        path.rename(subfolder / path.name)
    return subfolder


def list_samples(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(f"{EARLIER}-")]


def next_free_folder(folder: Path, name: str) -> Path:
    number = 1
    while (folder / f"{name}-{number:03d}").exists():
        number += 1
    return folder / f"{name}-{number:03d}"


def is_file(text: str | Path) -> bool:
    """Return whether a text is the path of a file; one that is too long for a path is not."""
    try:
        return Path(text).is_file()
    except OSError:
        return False

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
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tessera.run.errors import UserError

Json = dict[str, Any]
"""A JSON object."""

CLASSES = "classes.json"
"""The class names of a run whose captions are names of folders."""


VERSION = "tessera"
"""The key of config.json for the version of this package, which is no setting."""

PARTIAL = ".writing"
"""The end of the names of files and folders that are being written."""


@contextmanager
def replacing_file(path: Path, writer: str = "") -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces `path` when the context ends.

    Where several processes may write the same file, `writer` is a name for each of them.

    The result is the old file or the new one, never a part; it is flushed to the disk and has the
    permissions of the umask, whatever wrote it (safetensors creates files with mode 0600).
    """
    temporary = path.with_name(f".{path.name}{writer}{PARTIAL}")
    try:
        mode = create_empty(temporary)
        try:
            yield temporary
        except SafetensorError as error:  # which is no OSError, also where the disk is full
            raise OSError(errno.EIO, str(error)) from error
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def create_empty(path: Path) -> int:
    """Create an empty file and return its permissions, which are those of the umask."""
    with open(path, "wb") as file:
        return stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file so that it holds the old content or the new one, never a part."""
    with replacing_file(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def remove_partial(folder: Path) -> None:
    """Remove what interrupted writes left in a folder; everything else stays."""
    for entry in folder.glob(f".*{PARTIAL}"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


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
        return self.metrics.exists() or any(
            folder.is_dir() and not is_empty(folder) for folder in folders
        )

    # ---- creating and locking

    def check_ownership(self) -> None:
        """Raise UserError unless the directory is new, empty, or that of a run."""
        if not self.path.is_dir() or self.is_run() or self._has_only_created():
            return
        if self.config.is_file():
            found = "its config.json is not that of a run"
        else:
            names = sorted(entry.name for entry in self.path.iterdir())
            found = f"it has {len(names)} entries, such as {names[0]}, and no config.json of a run"
        raise UserError(
            f"{self.path} is not a run directory: {found}. Give a new or empty folder as --out; "
            "nothing was changed."
        )

    def is_run(self) -> bool:
        """Return whether config.json has a recipe and the version that wrote it."""
        config = read_json(self.config)
        return isinstance(config, dict) and "recipe" in config and VERSION in config

    def _has_only_created(self) -> bool:
        """Return whether nothing but what `create` and `lock` make is there, or imported
        checkpoints."""
        return all(
            (entry.name == "samples" and entry.is_dir() and is_empty(entry))
            or (entry.name == "checkpoints" and has_only_checkpoints(entry))
            or (entry.name == "lock" and is_lock(entry))
            or (entry.name == f".config.json{PARTIAL}")
            for entry in self.path.iterdir()
        )

    def create(self) -> None:
        for place in (self.samples, self.checkpoints, *self.checkpoints.parents):
            if place.is_file():
                raise UserError(
                    f"{self.path} cannot be a run directory: {place} is a file. Give another --out."
                )
        with self.explain_write_errors():
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.samples.mkdir(exist_ok=True)

    @contextmanager
    def explain_write_errors(self) -> Iterator[None]:
        """Raise UserError instead of an OSError, such as that of a full disk."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"The run directory {self.path} cannot be written ({error.strerror or error}). "
                "Free some disk space, or give another --out."
            ) from None

    def lock(self) -> None:
        """Prevent other runs from using this directory while this process is alive.

        This is a POSIX record lock: it ends with the process, however that ends, and unlike flock
        it is not inherited by data loading workers, which may outlive a killed run by some seconds.
        """
        if self._lock is not None:
            return
        file = self.path / "lock"
        if os.path.lexists(file) and not is_lock(file):
            raise UserError(
                f"{file} is not the lock of a run, which is a file with the number of a process: "
                "move it away, or give another --out."
            )
        with self.explain_write_errors():
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
        with self.explain_write_errors():
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
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.config} is not valid JSON: {error}.") from None
        except OSError as error:
            raise UserError(f"{self.config} cannot be read ({error.strerror}).") from None
        if not isinstance(config, dict):
            raise UserError(f"{self.config} must hold a JSON object, got {config!r}.")
        return config

    def write_config(self, config: Json) -> None:
        with self.explain_write_errors():
            write_atomically(self.config, json.dumps(config, indent=2) + "\n")

    def read_classes(self) -> list[str]:
        """Return the class names if the run was trained on them, else nothing."""
        classes = read_json(self.path / CLASSES)
        return [str(one) for one in classes] if isinstance(classes, list) else []

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

    def fsync_metrics(self) -> str:
        """Flush logged lines to the disk before a checkpoint, so that they survive a power cut.

        Returns the problem, or "": a checkpoint is worth more than its metrics.
        """
        try:
            if self.metrics.exists():
                with open(self.metrics, "rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def read_records(self, kind: str | None = None) -> list[Json]:
        """Return the records of metrics.jsonl, including those not yet written.

        Damaged lines are left out; `truncate_after` names and removes them.
        """
        lines = chain(read_lines(self.metrics), self._unwritten)
        if kind is None:
            return [record for record in parse_lines(lines) if has_step(record)]
        likely = (line for line in lines if f'"{kind}"' in line)  # parse only what can match
        records = (record for record in parse_lines(likely) if record.get("kind") == kind)
        return [record for record in records if has_step(record)]

    def truncate_after(self, step: int) -> list[str]:
        """Remove the records and notes of later steps, which a resumed run writes again.

        Returns a notice for each file in which lines were damaged; they are removed too.
        """
        last_steps = {"metrics.jsonl": step, "alarms.jsonl": step, "nonfinite.jsonl": step - 1}
        notices = []
        for name, last in last_steps.items():
            lines = list(read_lines(self.path / name))
            parsed = [list(parse_lines([line])) for line in lines]
            damaged = [n for n, one in enumerate(parsed, 1) if not one or not has_step(one[0])]
            if damaged and damaged != [len(lines)]:  # a kill can cut the last line short
                shown = ", ".join(map(str, damaged[:10]))
                notices.append(
                    f"{self.path / name}: {len(damaged)} damaged line(s) were removed ({shown})."
                )
            kept = [one[0] for one in parsed if one and has_step(one[0]) and one[0]["step"] <= last]
            if len(kept) < len(lines):
                with self.explain_write_errors():
                    text = "".join(json.dumps(record) + "\n" for record in kept)
                    write_atomically(self.path / name, text)
        self._unwritten.clear()
        return notices

    def remove_after(self, step: int) -> None:
        """Remove records, samples and checkpoints of later steps, which will be other ones."""
        self.truncate_after(step)
        for folder in (self.samples, self.checkpoints):
            for path in folder.iterdir():
                is_later = path.name.isascii() and path.name.isdigit() and int(path.name) > step
                if is_later and path.is_dir():
                    # Renamed first, so that a kill leaves no part of a checkpoint.
                    removed = path.rename(path.with_name(f".deleting-{path.name}"))
                    shutil.rmtree(removed, ignore_errors=True)

    def note(self, file_name: str, record: Json) -> None:
        """Append a line to a file of skipped examples, non-finite steps or alarms."""
        with contextlib.suppress(OSError):
            append_text(self.path / file_name, json.dumps(record) + "\n")

    def read_notes(self, file_name: str) -> list[Json]:
        return list(parse_lines(read_lines(self.path / file_name)))

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


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file; bytes that are no UTF-8 make their line damaged, not the file.

    A long run reads metrics.jsonl at each validation: the whole file at once would let its memory
    grow with its length, by 4 kB per step in a run that logs every step.
    """
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if line := line.rstrip("\n"):
                yield line


def parse_lines(lines: Iterable[str]) -> Iterator[Json]:
    """Parse lines of JSON objects; lines that are cut short or damaged are left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def has_step(record: Json) -> bool:
    step = record.get("step")
    return isinstance(step, int) and not isinstance(step, bool)


def read_json(path: Path) -> object:
    """Return the content of a JSON file, or None if it is missing or not valid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def is_lock(file: Path) -> bool:
    """Return whether a file has the number of a process and nothing else."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size > 20:
        return False
    return file.read_bytes().strip(b"0123456789") == b""


# ---- outputs of commands


def check_output_file(file: Path, is_ours: Callable[[object], bool]) -> Path:
    """Return a JSON file that may be written: a new one, or one that an earlier command wrote."""
    if file.is_dir():
        raise UserError(f"{file} is a folder: give the name of a file as --out.")
    if file.exists() and not is_ours(read_json(file)):
        raise UserError(f"{file} is another file and is not replaced. Give another --out.")
    return file


def is_evaluation(content: object) -> bool:
    return isinstance(content, dict) and content.keys() >= {"metrics", "protocol"}


def is_sample_settings(content: object) -> bool:
    return isinstance(content, dict) and content.keys() >= {"run", "step", "count"}


EARLIER = "earlier"


def check_sample_folder(folder: Path) -> Path:
    """Return a folder that samples may be written to: new, empty, or with earlier samples."""
    is_taken = folder.exists() and (
        not folder.is_dir()
        or (list_samples(folder) and not is_sample_settings(read_json(folder / "settings.json")))
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
    # The settings last: without them the folder would not be recognised after a kill.
    for path in sorted(earlier, key=lambda path: path.name == "settings.json"):
        path.rename(subfolder / path.name)
    return subfolder


def list_samples(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.iterdir()
        if not path.name.startswith(f"{EARLIER}-")
        and not (path.name.startswith(".") and path.name.endswith(PARTIAL))
    ]


def next_free_folder(folder: Path, name: str) -> Path:
    number = 1
    while (folder / f"{name}-{number:03d}").exists():
        number += 1
    return folder / f"{name}-{number:03d}"


def has_only_checkpoints(folder: Path) -> bool:
    """Return whether a folder is empty or holds nothing but complete checkpoints."""
    return folder.is_dir() and all((one / "manifest.json").is_file() for one in folder.iterdir())


def is_file(text: str | Path) -> bool:
    """Return whether a text is the path of a file; one that is too long for a path is not."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long, or with a null character
        return False

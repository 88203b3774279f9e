"""Checkpoints: tensors and JSON in a folder that is complete or does not exist.

    checkpoints/000500/  *.safetensors, state.json, and manifest.json, written last, with sizes and checksums

A checkpoint is written beside its place under a dotted name, flushed to the disk, and renamed.
Loading verifies the manifest and falls back to the newest complete one. Nothing is pickled and
nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tessera.run.directory import UserError, fsync_folder

WRITING, DELETING = ".writing-", ".deleting-"


@dataclass
class Snapshot:
    """Everything a run needs to go on, as it was at one step."""

    done: int
    tensors: dict[str, dict[str, Tensor]]
    """One file each: `model`, `ema`, `others`, `optimizer.model`, ..."""
    state: dict[str, Any]
    """Counters and other plain values."""


def stage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy on the CPU that the running step cannot change any more."""
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }


def step_name(step: int) -> str:
    return f"{step:06d}"


def steps_in(checkpoints: Path) -> list[int]:
    """The steps of the checkpoints that stand in a folder, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in checkpoints.iterdir()
        if entry.name.isdigit() and entry.is_dir()
    )


# ---- writing


def write(checkpoints: Path, snapshot: Snapshot) -> Path:
    """Writes a step's checkpoint under its number, and clears what earlier, interrupted writes left
    behind."""
    remove_partial(checkpoints)
    return write_at(checkpoints / step_name(snapshot.done), snapshot)


def write_at(final: Path, snapshot: Snapshot) -> Path:
    """Writes a complete checkpoint or none; one that stood in its place is there until the new one
    is whole."""
    if final.exists() and not (final / "manifest.json").exists():
        raise UserError(
            f"{final} is there already and is no checkpoint. Give another path; nothing was changed."
        )
    temporary = final.with_name(f"{WRITING}{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name, tensors in snapshot.tensors.items():
            save_file(
                tensors, temporary / f"{name}.safetensors", metadata={"done": str(snapshot.done)}
            )
        (temporary / "state.json").write_text(
            json.dumps({"done": snapshot.done, **snapshot.state}, indent=1)
        )
        files = {path.name: _described(path) for path in sorted(temporary.iterdir())}
        (temporary / "manifest.json").write_text(
            json.dumps({"done": snapshot.done, "files": files}, indent=1)
        )
        for path in temporary.iterdir():
            _fsync(path)
        fsync_folder(temporary)
        doomed = _set_aside(final) if final.exists() else None
        os.replace(temporary, final)
        fsync_folder(final.parent)
        if doomed is not None:
            shutil.rmtree(doomed, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def prune(checkpoints: Path, keep: Callable[[list[int]], set[int]], written: int) -> None:
    """Removes the checkpoints not named by `keep`; the one just written always stays.

    Later ones are left alone and not counted: they were found damaged, and will be written over
    when their step comes.
    """
    steps = [step for step in steps_in(checkpoints) if step <= written]
    for step in set(steps) - keep(steps) - {written}:
        shutil.rmtree(_set_aside(checkpoints / step_name(step)), ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    """Renames what is to be deleted, so that a kill halfway leaves no folder that looks like a
    checkpoint."""
    doomed = folder.with_name(f"{DELETING}{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    return doomed


def remove_partial(checkpoints: Path) -> None:
    """Clears what interrupted writes and removals left behind; nothing that ever was a complete
    checkpoint."""
    for entry in checkpoints.iterdir():
        if entry.name.startswith((WRITING, DELETING)):
            shutil.rmtree(entry, ignore_errors=True)


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _described(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


class Writer:
    """Writes snapshots in the background, one at a time, in order; the step only waits for the
    staging copy.

    A write that fails (a full disk) is told to `on_failure`; the run goes on and the older
    checkpoint stays.
    """

    def __init__(
        self,
        checkpoints: Path,
        keep: Callable[[list[int]], set[int]],
        on_failure: Callable[[Exception], None],
    ):
        self._checkpoints = checkpoints
        self._keep = keep
        self._on_failure = on_failure
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def begin(self, snapshot: Snapshot) -> None:
        self.wait()
        self._pending = self._threads.submit(self._write_and_prune, snapshot)

    def _write_and_prune(self, snapshot: Snapshot) -> None:
        write(self._checkpoints, snapshot)
        prune(self._checkpoints, self._keep, snapshot.done)

    def wait(self) -> bool:
        """Blocks until nothing is being written; False if the last write failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        error = pending.exception()
        if error is None:
            return True
        if not isinstance(error, Exception):
            raise error
        self._on_failure(error)
        return False

    def close(self) -> None:
        self.wait()
        self._threads.shutdown()


# ---- reading


def find_corruption(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words, or nothing."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        expected = {name: (one["bytes"], one["sha256"]) for name, one in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is missing or unreadable"
    for name, (size, checksum) in expected.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _described(path)["sha256"] != checksum:
            return f"{name} does not match its checksum"
    return None


def newest(checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint; damaged ones are passed over, and it is said."""
    steps = steps_in(checkpoints)
    for step in reversed(steps):
        folder = checkpoints / step_name(step)
        problem = find_corruption(folder)
        if problem is None:
            return folder
        say(f"Checkpoint {folder.name} is damaged ({problem}); looking for an older one.")
    if steps:
        raise UserError(
            f"None of the {len(steps)} checkpoints in {checkpoints} is complete. Nothing was changed: "
            "restore one from a backup, or start anew with --fresh."
        )
    return None


def read(folder: Path) -> Snapshot:
    """Reads a checkpoint that `find_corruption` found whole."""
    state = json.loads((folder / "state.json").read_text())
    tensors = {path.stem: tensors_in(path) for path in sorted(folder.glob("*.safetensors"))}
    return Snapshot(done=state.pop("done"), tensors=tensors, state=state)


def tensors_in(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}.") from None


def restore_network(network: nn.Module, tensors: dict[str, Tensor], what: str) -> None:
    """Strict: a missing, extra or reshaped tensor is a refusal that names both sides."""
    own = network.state_dict()
    problems = [f"{name} is missing from the file" for name in own if name not in tensors]
    problems += [
        f"{name} is in the file but not in the network" for name in tensors if name not in own
    ]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)} in the file and {tuple(own[name].shape)} in the network"
        for name in own
        if name in tensors and own[name].shape != tensors[name].shape
    ]
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(
            f"The {what} comes from another network:\n  " + "\n  ".join(problems[:8]) + more
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

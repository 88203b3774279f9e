"""Checkpoints: tensors and JSON in a folder that is complete or does not exist.

    checkpoints/000500/  *.safetensors, state.json, and manifest.json with sizes and checksums

A checkpoint is written under a temporary name, flushed to the disk and renamed; the manifest is
written last. Loading verifies the manifest and falls back to the newest complete checkpoint.
Nothing is pickled or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tessera.run.directory import Json, fsync_folder
from tessera.run.errors import UserError

WRITING, DELETING = ".writing-", ".deleting-"


@dataclass
class Snapshot:
    """The complete state of a run at one step."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    """One file each: `model`, `ema`, `others`, `optimizer.model`, ..."""
    state: Json
    """Counters and other plain values."""


def stage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, so that training can continue while they are written."""
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }


def step_name(step: int) -> str:
    return f"{step:06d}"


def list_steps(checkpoints: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, oldest first; other folders are ignored."""
    if not checkpoints.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in checkpoints.iterdir()
        if re.fullmatch("[0-9]{6,18}", entry.name)
        and entry.name == step_name(int(entry.name))
        and entry.is_dir()
    )


# ---- writing


def write(checkpoints: Path, snapshot: Snapshot) -> Path:
    """Write the checkpoint of a step and remove what interrupted writes left behind."""
    remove_partial(checkpoints)
    path = checkpoints / step_name(snapshot.step)
    if path.exists() and not (path / "manifest.json").exists():
        os.replace(path, next_free_name(path, "incomplete"))  # a part of a copy, most likely
    return write_to(path, snapshot)


def next_free_name(path: Path, ending: str) -> Path:
    number = 1
    while path.with_name(f"{path.name}.{ending}-{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{ending}-{number}")


def write_to(path: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint to a path; an existing one stays until the new one is complete."""
    if path.exists() and not (path / "manifest.json").exists():
        raise UserError(f"{path} exists and is not a checkpoint. Give another path.")
    temporary = path.with_name(f"{WRITING}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        state = json.dumps({"step": snapshot.step, **snapshot.state}, indent=1)
        (temporary / "state.json").write_text(state)
        mode = stat.S_IMODE((temporary / "state.json").stat().st_mode)
        for name, tensors in snapshot.tensors.items():
            file = temporary / f"{name}.safetensors"
            save_file(tensors, file, metadata={"step": str(snapshot.step)})
            file.chmod(mode)  # that of the umask; save_file creates files with mode 0600
        files = {file.name: describe_file(file) for file in sorted(temporary.iterdir())}
        manifest = json.dumps({"step": snapshot.step, "files": files}, indent=1)
        (temporary / "manifest.json").write_text(manifest)
        for file in temporary.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        fsync_folder(temporary)
        replaced = rename_for_deletion(path) if path.exists() else None
        os.replace(temporary, path)
        fsync_folder(path.parent)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def prune(checkpoints: Path, keep: Callable[[list[int]], set[int]], written: int) -> None:
    """Remove the checkpoints that `keep` does not return; the one just written is kept.

    Later checkpoints are ignored: they were found to be corrupt and are replaced when their step is
    reached again. Folders without a manifest are not checkpoints and stay.
    """
    steps = [
        step
        for step in list_steps(checkpoints)
        if step <= written and (checkpoints / step_name(step) / "manifest.json").exists()
    ]
    for step in set(steps) - keep(steps) - {written}:
        shutil.rmtree(rename_for_deletion(checkpoints / step_name(step)), ignore_errors=True)


def rename_for_deletion(folder: Path) -> Path:
    """Rename a folder before its deletion, so that an interrupted deletion leaves no checkpoint."""
    renamed = folder.with_name(f"{DELETING}{folder.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    os.replace(folder, renamed)
    return renamed


def remove_partial(checkpoints: Path) -> None:
    """Remove what interrupted writes and deletions left; complete checkpoints are not touched."""
    for entry in checkpoints.iterdir():
        if entry.name.startswith((WRITING, DELETING)):
            shutil.rmtree(entry, ignore_errors=True)


def describe_file(path: Path) -> Json:
    with open(path, "rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": checksum}


class Writer:
    """Write snapshots in a background thread, one at a time and in order.

    Training waits only for the staging copy. A failed write (a full disk, for example) is reported
    to `on_failure`; training continues and the older checkpoint stays.
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

    def submit(self, snapshot: Snapshot, prune: bool = True) -> None:
        """Write a snapshot after the pending one; then remove older ones that need not be kept."""
        self.wait()
        self._pending = self._threads.submit(self._write_and_prune, snapshot, prune)

    def _write_and_prune(self, snapshot: Snapshot, is_pruned: bool) -> None:
        write(self._checkpoints, snapshot)
        if is_pruned:
            prune(self._checkpoints, self._keep, snapshot.step)

    def rewrite(self, snapshot: Snapshot) -> bool:
        """Write a snapshot now; return False if that failed."""
        self.submit(snapshot)
        return self.wait()

    def wait(self) -> bool:
        """Wait for the pending write; return False if it failed."""
        pending, self._pending = self._pending, None
        error = pending.exception() if pending is not None else None
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
    """Verify a checkpoint against its manifest; return the problem, or None."""
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
        if describe_file(path)["sha256"] != checksum:
            return f"{name} does not match its checksum"
    return None


def find_newest(checkpoints: Path, warn: Callable[[str], None]) -> Path | None:
    """Return the newest complete checkpoint; warn about each corrupt one that is passed over."""
    steps = list_steps(checkpoints)
    passed: list[int] = []
    while remaining := [step for step in steps if step not in passed]:
        folder = checkpoints / step_name(remaining[-1])
        problem = find_corruption(folder)
        if problem is None:
            return folder
        if not folder.exists():  # a run that is training has pruned it and written a newer one
            steps = list_steps(checkpoints)
            continue
        passed.append(remaining[-1])
        warn(f"Checkpoint {folder.name} is corrupt ({problem}); trying an older one.")
    if steps:
        raise UserError(
            f"None of the {len(steps)} checkpoints in {checkpoints} is complete. Nothing was "
            "changed: restore one from a backup, or start a new run with --fresh."
        )
    return None


def find_healthy(checkpoints: Path) -> str | None:
    """Return the newest complete checkpoint that was not written while steps were skipped."""
    for step in reversed(list_steps(checkpoints)):
        folder = checkpoints / step_name(step)
        if find_corruption(folder) is None:
            guard = json.loads((folder / "state.json").read_text())["guard"]
            if not any(guard["consecutive"].values()):
                return str(folder)
    return None


def best_step(
    steps: Sequence[int], records: Sequence[Json], metric: str, higher_is_better: bool
) -> int | None:
    """Return the step with the best validation metric of the EMA weights, None if none has one.

    Args:
        steps: The steps to choose from.
        records: The records of validations.
        metric: The name of the metric, without the prefix of EMA weights.
    """
    values = {record["step"]: record.get(f"val_ema/{metric}") for record in records}
    scored: dict[int, float] = {
        step: float(value)
        for step in steps
        if isinstance(value := values.get(step), (int, float))  # null if it was not finite
    }
    choose = max if higher_is_better else min
    return choose(scored, key=lambda step: scored[step]) if scored else None


def read(folder: Path) -> Snapshot:
    """Read a checkpoint that `find_corruption` has verified."""
    state = json.loads((folder / "state.json").read_text())
    tensors = {path.stem: read_tensors(path) for path in sorted(folder.glob("*.safetensors"))}
    return Snapshot(step=state.pop("step"), tensors=tensors, state=state)


@dataclass(frozen=True)
class LoadedTensors:
    step: int
    source: Path
    """The file that was read."""
    tensors: dict[str, Tensor]


def load_newest(
    checkpoints: Path, file_name: str, warn: Callable[[str], None]
) -> LoadedTensors | None:
    """Read a file of the newest complete checkpoint, also while a run writes and prunes them."""
    while (found := find_newest(checkpoints, warn)) is not None:
        try:
            return LoadedTensors(
                int(found.name), found / file_name, read_tensors(found / file_name)
            )
        except FileNotFoundError:
            if found.exists():
                raise UserError(f"The checkpoint {found} has no {file_name}.") from None
    return None


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}.") from None


def load_strictly(
    network: nn.Module,
    tensors: dict[str, Tensor],
    source: str,
    copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Copy tensors into a network; report every missing, unexpected or mismatched one.

    `copy` copies the second tensor into the first, such as into a shard of it.
    """
    own = network.state_dict()
    problems = [f"{name} is missing from the file" for name in own if name not in tensors]
    problems += [
        f"{name} is in the file but not in the network" for name in tensors if name not in own
    ]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)} in the file and {tuple(own[name].shape)} "
        "in the network"
        for name in own
        if name in tensors and own[name].shape != tensors[name].shape
    ]
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UserError(
            f"The {source} does not fit this network:\n  " + "\n  ".join(problems[:8]) + more
        )
    with torch.no_grad():
        for name, tensor in own.items():
            copy(tensor, tensors[name])

"""Checkpoints are complete or absent: round trips, corruption, full disks, and a kill at every
file operation."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.engine import checkpoint
from tessera.engine.checkpoint import (
    Snapshot,
    Writer,
    best_step,
    find_corruption,
    find_newest,
    list_steps,
    load_strictly,
    prune,
    read,
    read_tensors,
    stage,
    write,
    write_to,
)
from tessera.engine.evaluation import Evaluation
from tessera.run.errors import UserError
from tests.engine.small_task import small_engine

KEEP_ALL = set


def make_snapshot(step: int) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    return Snapshot(
        step=step,
        tensors={
            "model": {
                "weight": torch.randn(4, 3, generator=generator),
                "half": torch.randn(5, generator=generator).bfloat16(),
                "counter": torch.tensor(step),
                "started": torch.tensor(True),
            },
            "optimizer.model": {"exp_avg/encoder.weight": torch.randn(4, 3, generator=generator)},
        },
        state={"guard": {"skipped": 2, "consecutive": {"model": 1}}, "torch": "any"},
    )


def are_equal(left: Snapshot, right: Snapshot) -> bool:
    def tensors_are_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
        return a.keys() == b.keys() and all(
            a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
        )

    return (
        (left.step, left.state) == (right.step, right.state)
        and left.tensors.keys() == right.tensors.keys()
        and all(tensors_are_equal(left.tensors[file], right.tensors[file]) for file in left.tensors)
    )


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with complete checkpoints of steps 10 and 20."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (10, 20):
        write(folder, make_snapshot(step))
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fail_on_warning(text: str) -> None:
    raise AssertionError(f"unexpected warning: {text}")


# ---- round trips


def test_a_checkpoint_is_read_exactly_as_it_was_written(checkpoints):
    found = find_newest(checkpoints, fail_on_warning)
    assert found == checkpoints / "000020"
    assert are_equal(read(found), make_snapshot(20))
    assert list_steps(checkpoints) == [10, 20]


def test_a_checkpoint_holds_safetensors_json_and_a_complete_manifest(checkpoints):
    folder = checkpoints / "000020"
    files = {path.name for path in folder.iterdir()}
    assert files == {
        "model.safetensors",
        "optimizer.model.safetensors",
        "state.json",
        "manifest.json",
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"].keys() == files - {"manifest.json"}
    for name, described in manifest["files"].items():
        assert described["bytes"] == (folder / name).stat().st_size


def test_steps_are_ordered_as_numbers_beyond_a_million(checkpoints):
    write(checkpoints, make_snapshot(1_000_000))
    write(checkpoints, make_snapshot(999_999))
    assert list_steps(checkpoints) == [10, 20, 999_999, 1_000_000]
    assert find_newest(checkpoints, fail_on_warning) == checkpoints / "1000000"


def test_a_folder_without_checkpoints_has_no_newest_one(tmp_path):
    assert find_newest(tmp_path / "missing", fail_on_warning) is None
    assert find_newest(tmp_path, fail_on_warning) is None


def test_a_staged_copy_is_independent_of_later_training_steps():
    weight = nn.Parameter(torch.ones(4, 4))
    copied = stage({"weight": weight, "transposed": weight.T})
    with torch.no_grad():
        weight.add_(1)
    assert all(
        torch.equal(tensor, torch.ones(4, 4)) and tensor.is_contiguous()
        for tensor in copied.values()
    )
    assert copied["weight"].data_ptr() != copied["transposed"].data_ptr(), (
        "safetensors cannot save tensors that share memory"
    )


def test_a_checkpoint_at_any_path_replaces_only_another_checkpoint(checkpoints, tmp_path):
    path = tmp_path / "new" / "export"
    for step in (30, 40):
        assert write_to(path, make_snapshot(step)) == path
        assert are_equal(read(path), make_snapshot(step))
    assert [entry.name for entry in path.parent.iterdir()] == ["export"]
    other = tmp_path / "photos"
    other.mkdir()
    (other / "a.png").write_text("not a checkpoint")
    with pytest.raises(UserError, match="photos exists and is not a checkpoint. Give another path"):
        write_to(other, make_snapshot(50))
    assert read_files(other) == {"a.png": b"not a checkpoint"}


# ---- corruption


def truncate_file(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    return "model.safetensors has .* bytes instead of"


def flip_a_bit(folder: Path) -> str:
    file = folder / "optimizer.model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    return "optimizer.model.safetensors does not match its checksum"


def remove_a_file(folder: Path) -> str:
    (folder / "state.json").unlink()
    return "state.json is missing"


def remove_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "its manifest is missing or unreadable"


def truncate_the_manifest(folder: Path) -> str:
    file = folder / "manifest.json"
    file.write_bytes(file.read_bytes()[:40])
    return "its manifest is missing or unreadable"


CORRUPTIONS = [
    truncate_file,
    flip_a_bit,
    remove_a_file,
    remove_the_manifest,
    truncate_the_manifest,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_a_corrupt_checkpoint_is_passed_over_with_a_warning(corrupt, checkpoints):
    problem = corrupt(checkpoints / "000020")
    before = read_files(checkpoints)
    warnings: list[str] = []
    found = find_newest(checkpoints, warnings.append)
    assert found == checkpoints / "000010"
    assert are_equal(read(found), make_snapshot(10))
    assert len(warnings) == 1 and "000020 is corrupt" in warnings[0]
    assert re.search(problem, warnings[0])
    assert read_files(checkpoints) == before, "the search changes nothing"


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_without_a_complete_checkpoint_the_run_stops_and_changes_nothing(corrupt, checkpoints):
    for folder in checkpoints.iterdir():
        corrupt(folder)
    before = read_files(checkpoints)
    warnings: list[str] = []
    with pytest.raises(UserError, match="None of the 2 checkpoints .* Nothing was changed"):
        find_newest(checkpoints, warnings.append)
    assert len(warnings) == 2
    assert read_files(checkpoints) == before


def test_every_flipped_bit_is_detected_without_a_crash(checkpoints):
    folder = checkpoints / "000020"
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        for position in range(0, len(data), 7):
            flipped = bytearray(data)
            flipped[position] ^= 1 << (position % 8)
            file.write_bytes(flipped)
            problem = find_corruption(folder)
            if file.name == "manifest.json" and problem is None:
                # A digit of its step or a space, which nothing depends on.
                assert are_equal(read(folder), make_snapshot(20))
            else:
                assert problem is not None, (file.name, position)
        file.write_bytes(data)
    assert find_corruption(folder) is None


def test_a_manifest_cannot_refer_to_files_outside_its_folder(checkpoints):
    (checkpoints / "000010" / "manifest.json").write_text(
        json.dumps({"step": 10, "files": {"../000020/state.json": {"bytes": 1, "sha256": ""}}})
    )
    assert find_corruption(checkpoints / "000010") == "../000020/state.json is missing"


def test_nothing_is_unpickled(checkpoints, tmp_path):
    class Malicious:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    (checkpoints / "pickled.safetensors").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(UserError, match="not a readable safetensors file"):
        read_tensors(checkpoints / "pickled.safetensors")
    assert not (tmp_path / "executed").exists()
    events: list[str] = []
    is_active = True
    sys.addaudithook(
        lambda event, _: (
            events.append(event) if is_active and event == "pickle.find_class" else None
        )
    )
    pickle.loads(pickle.dumps(Path("a")))
    assert events, "the audit hook works"
    events.clear()
    read(checkpoints / "000020")
    is_active = False  # an audit hook cannot be removed
    assert not events


# ---- pruning


@pytest.mark.parametrize(
    "keep",
    [lambda steps: set(), lambda steps: {steps[0]}, lambda steps: {999}],
    ids=["none", "oldest", "unknown step"],
)
def test_the_checkpoint_just_written_is_never_pruned(keep, checkpoints):
    write(checkpoints, make_snapshot(30))
    prune(checkpoints, keep, written=30)
    assert list_steps(checkpoints)[-1] == 30
    assert are_equal(read(find_newest(checkpoints, fail_on_warning)), make_snapshot(30))


def test_the_only_checkpoint_is_never_pruned(tmp_path):
    write(tmp_path, make_snapshot(10))
    prune(tmp_path, lambda steps: set(), written=10)
    assert list_steps(tmp_path) == [10]


def test_a_corrupt_newer_checkpoint_does_not_count_as_the_newest(checkpoints):
    """The run fell back to step 10, resumed and saved step 15; step 20 is still corrupt."""
    truncate_file(checkpoints / "000020")
    write(checkpoints, make_snapshot(15))
    for last, left in ((2, [10, 15, 20]), (1, [15, 20])):
        prune(checkpoints, lambda steps, last=last: set(steps[-last:]), written=15)
        assert list_steps(checkpoints) == left
        assert find_newest(checkpoints, lambda text: None) == checkpoints / "000015"


def test_a_writer_that_keeps_one_checkpoint_always_has_a_complete_one(checkpoints):
    truncate_file(checkpoints / "000020")
    writer = Writer(checkpoints, lambda steps: set(steps[-1:]), on_failure=pytest.fail)
    for step in (12, 14):
        writer.submit(make_snapshot(step))
        assert writer.wait()
        newest = find_newest(checkpoints, lambda text: None)
        assert are_equal(read(newest), make_snapshot(step))
    writer.close()


def test_the_newest_the_best_and_the_multiples_are_selected(tmp_path):
    engine = small_engine(tmp_path, keep_last=2, keep_every=40)
    errors = {10: 0.5, 20: 0.1, 30: 0.3, 40: 0.2, 50: 0.2, 60: 0.4, 70: None}
    for step, error in errors.items():
        engine.directory.log(
            {"step": step, "kind": "validation", "val_ema/error": error, "val/error": 0.0}
        )
    select = engine.saver.select_checkpoints
    assert select([10, 20, 30, 40, 50, 60, 70]) == {20, 40, 60, 70}
    assert select([50, 60, 70]) == {50, 60, 70}, "the best of those that exist"


def test_a_run_keeps_its_newest_and_its_best_checkpoint(tmp_path):
    engine = small_engine(tmp_path, steps=8, checkpoint_every=1, validate_every=1, keep_last=2)
    errors = [5.0, 1.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    engine.evaluate = lambda: Evaluation({"error": errors[engine.global_step - 1]}, 32)
    engine.run()
    assert list_steps(engine.directory.checkpoints) == [2, 7, 8]


# ---- partial checkpoints


def test_only_what_an_interrupted_write_left_is_removed(checkpoints):
    for name in (".writing-000030", ".deleting-000010"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_text("partial")
    (checkpoints / "notes").mkdir()
    (checkpoints / "notes" / "mine.txt").write_text("written by hand")
    (checkpoints / ".hidden").write_text("written by hand")
    assert list_steps(checkpoints) == [10, 20], "partial checkpoints are not listed"
    write(checkpoints, make_snapshot(30))
    names = {entry.name for entry in checkpoints.iterdir()}
    assert names == {"000010", "000020", "000030", "notes", ".hidden"}


# ---- strict loading


def test_tensors_of_another_network_are_rejected_with_all_differences():
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    tensors = {
        "0.weight": torch.zeros(3, 2),
        "0.bias": torch.zeros(4),
        "1.weight": torch.zeros(1, 3),
        "2.bias": torch.zeros(1),
    }
    with pytest.raises(UserError) as raised:
        load_strictly(network, tensors, "model in the checkpoint")
    message = str(raised.value)
    assert "The model in the checkpoint does not fit this network" in message
    assert "1.bias is missing from the file" in message
    assert "2.bias is in the file but not in the network" in message
    assert "0.bias has shape (4,) in the file and (3,) in the network" in message
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items()
    ), "no tensor was loaded"


def test_a_long_list_of_differences_ends_with_a_count():
    network = nn.Sequential(*[nn.Linear(1, 1) for _ in range(10)])
    with pytest.raises(UserError, match="and 12 more"):
        load_strictly(network, {}, "model")


def test_a_matching_network_is_loaded_exactly_and_in_place():
    network, other = nn.Linear(2, 3), nn.Linear(2, 3)
    weight = network.weight
    load_strictly(network, other.state_dict(), "model")
    assert torch.equal(network.weight, other.weight) and network.weight is weight


# ---- a full disk


def save_partially(tensors: dict[str, Tensor], path: Path, **_: Any) -> None:
    """Write a part of a file and fail, like a disk that becomes full."""
    path.write_bytes(b"half a file")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_write_is_reported_and_older_checkpoints_stay(checkpoints, monkeypatch):
    failures: list[Exception] = []
    writer = Writer(checkpoints, KEEP_ALL, failures.append)
    before = read_files(checkpoints)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", save_partially)
        writer.submit(make_snapshot(30))
        assert not writer.wait()
    assert [str(error) for error in failures] == ["[Errno 28] No space left on device"]
    assert read_files(checkpoints) == before, "no partial file stays on the disk"
    writer.submit(make_snapshot(40))
    assert writer.wait(), "the next write succeeds"
    writer.close()
    assert are_equal(read(find_newest(checkpoints, fail_on_warning)), make_snapshot(40))


def test_a_failure_is_reported_before_the_next_write_starts(checkpoints, monkeypatch):
    failures: list[Exception] = []
    writer = Writer(checkpoints, KEEP_ALL, failures.append)
    monkeypatch.setattr(checkpoint, "save_file", save_partially)
    writer.submit(make_snapshot(30))
    writer.submit(make_snapshot(40))
    assert len(failures) == 1
    writer.close()
    assert len(failures) == 2


def test_writes_run_in_another_thread_and_in_order(checkpoints, monkeypatch):
    main_thread = threading.current_thread()
    written: list[tuple[int, bool]] = []
    original = checkpoint.write

    def recording_write(folder: Path, snapshot: Snapshot) -> Path:
        written.append((snapshot.step, threading.current_thread() is main_thread))
        return original(folder, snapshot)

    monkeypatch.setattr(checkpoint, "write", recording_write)
    writer = Writer(checkpoints, KEEP_ALL, on_failure=pytest.fail)
    for step in (30, 40, 50):
        writer.submit(make_snapshot(step))
    writer.close()
    assert written == [(30, False), (40, False), (50, False)]


# ---- a kill at every file operation


class Killed(BaseException):
    """Raised in place of a kill. It must not be caught: a killed process cleans nothing up."""


class KillSwitch:
    """Raise Killed before file operation number `at`, or in the middle of it if it writes.

    Every later operation raises too, so nothing reaches the disk after the kill.
    """

    def __init__(self, at: int):
        self.remaining = at

    def kill_before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return function(*args, **kwargs)

        return wrapper

    def kill_before_or_halfway(
        self, function: Callable[..., Any], path_at: int
    ) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.count()
            result = function(*args, **kwargs)
            self.count(truncate=args[path_at])
            return result

        return wrapper

    def count(self, truncate: Path | None = None) -> None:
        self.remaining -= 1
        if self.remaining == -1 and truncate is not None:
            os.truncate(truncate, os.path.getsize(truncate) // 2)
        if self.remaining < 0:
            raise Killed

    def install(self, patched: pytest.MonkeyPatch) -> None:
        for name in ("replace", "mkdir", "rmdir", "unlink", "fsync"):
            patched.setattr(os, name, self.kill_before(getattr(os, name)))
        save_file = self.kill_before_or_halfway(checkpoint.save_file, path_at=1)
        patched.setattr(checkpoint, "save_file", save_file)
        write_text = self.kill_before_or_halfway(Path.write_text, path_at=0)
        patched.setattr(Path, "write_text", write_text)


def is_killed(function: Callable[[], None], at: int) -> bool:
    """Call a function and kill it at file operation `at`; return False if it finished before."""
    with pytest.MonkeyPatch.context() as patched:
        KillSwitch(at).install(patched)
        try:
            function()
        except Killed:
            return True
        return False


def leave_clean(checkpoints: Path) -> None:
    """Change nothing: the folder holds complete checkpoints only."""


def leave_partial(checkpoints: Path) -> None:
    """Add a corrupt checkpoint of step 30 and what earlier interrupted operations left."""
    write(checkpoints, make_snapshot(30))
    truncate_file(checkpoints / "000030")
    for name in (".writing-000030", ".deleting-000030", ".deleting-000005"):
        shutil.copytree(checkpoints / "000010", checkpoints / name)


@pytest.mark.parametrize("prepare", [leave_clean, leave_partial])
def test_after_a_kill_the_old_or_new_checkpoint_is_complete(prepare, checkpoints, tmp_path):
    prepare(checkpoints)

    def write_and_prune(folder: Path) -> None:
        write(folder, make_snapshot(30))
        prune(folder, lambda steps: set(steps[-1:]), written=30)

    outcomes: list[int] = []
    for at in range(200):
        folder = tmp_path / f"killed at {at}"
        shutil.copytree(checkpoints, folder)
        killed = is_killed(lambda folder=folder: write_and_prune(folder), at)
        found = find_newest(folder, lambda text: None)
        assert found is not None
        outcomes.append(read(found).step)
        assert are_equal(read(found), make_snapshot(outcomes[-1]))
        write_and_prune(folder)  # the run resumes
        assert [entry.name for entry in folder.iterdir()] == ["000030"]
        assert are_equal(read(find_newest(folder, fail_on_warning)), make_snapshot(30))
        shutil.rmtree(folder)
        if not killed:
            break
    assert not killed, "the last call finished"
    assert len(outcomes) > 20 and set(outcomes) == {20, 30}
    assert outcomes == sorted(outcomes), "once the new checkpoint exists, it stays"


@pytest.mark.parametrize(("higher_is_better", "best"), [(False, 20), (True, 10)])
def test_the_best_step_has_the_best_validation_of_those_that_exist(higher_is_better, best):
    records = [
        {"step": step, "val_ema/loss": loss}
        for step, loss in ((5, 0.1), (10, 3.0), (20, 1.0), (30, 2.0), (40, None))
    ]
    assert best_step([10, 20, 30, 40], records, "loss", higher_is_better) == best
    assert best_step([40], records, "loss", higher_is_better) is None
    assert best_step([], [], "loss", higher_is_better) is None

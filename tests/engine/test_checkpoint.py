"""A checkpoint is complete or it is not there: round trips, damage, full disks, and death at every
file operation."""

from __future__ import annotations

import errno
import json
import os
import pickle
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
    find_corruption,
    newest,
    prune,
    read,
    restore_network,
    stage,
    steps_in,
)
from tessera.run.directory import UserError
from tests.engine.toy import toy_engine

KEEP_ALL = set


def snapshot(done: int) -> Snapshot:
    generator = torch.Generator().manual_seed(done)
    return Snapshot(
        done=done,
        tensors={
            "model": {
                "weight": torch.randn(4, 3, generator=generator),
                "half": torch.randn(5, generator=generator).bfloat16(),
                "counter": torch.tensor(done),
                "started": torch.tensor(True),
            },
            "optimizer.model": {"exp_avg/encoder.weight": torch.randn(4, 3, generator=generator)},
        },
        state={"guard": {"skipped_steps": 2, "in_a_row": {"model": 1}}, "torch": "any"},
    )


def same(left: Snapshot, right: Snapshot) -> bool:
    def exactly(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
        return a.keys() == b.keys() and all(
            a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
        )

    return (
        (left.done, left.state) == (right.done, right.state)
        and left.tensors.keys() == right.tensors.keys()
        and all(exactly(left.tensors[file], right.tensors[file]) for file in left.tensors)
    )


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with the complete checkpoints of steps 10 and 20."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for done in (10, 20):
        checkpoint.write(folder, snapshot(done))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def nobody_speaks(text: str) -> None:
    raise AssertionError(f"there was nothing to say, but: {text}")


# ------------------------------------------------------------------------------------------------------- round trips


def test_what_is_read_is_what_was_written(checkpoints):
    found = newest(checkpoints, nobody_speaks)
    assert found == checkpoints / "000020"
    assert same(read(found), snapshot(20))
    assert steps_in(checkpoints) == [10, 20]


def test_a_checkpoint_is_tensors_and_json_with_a_manifest_of_all_of_it(checkpoints):
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


def test_steps_are_ordered_as_numbers_also_beyond_a_million(checkpoints):
    checkpoint.write(checkpoints, snapshot(1_000_000))
    checkpoint.write(checkpoints, snapshot(999_999))
    assert steps_in(checkpoints) == [10, 20, 999_999, 1_000_000]
    assert newest(checkpoints, nobody_speaks) == checkpoints / "1000000"


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert newest(tmp_path / "never made", nobody_speaks) is None
    assert newest(tmp_path, nobody_speaks) is None


def test_a_staged_copy_does_not_follow_the_running_step():
    weight = nn.Parameter(torch.ones(4, 4))
    copied = stage({"whole": weight, "turned": weight.T})
    with torch.no_grad():
        weight.add_(1)
    assert all(
        torch.equal(tensor, torch.ones(4, 4)) and tensor.is_contiguous()
        for tensor in copied.values()
    )
    assert copied["whole"].data_ptr() != copied["turned"].data_ptr(), (
        "safetensors stores no tensor twice"
    )


# ------------------------------------------------------------------------------------------------------------ damage


def cut_short(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    return "model.safetensors has .* bytes instead of"


def flip_a_bit(folder: Path) -> str:
    file = folder / "optimizer.model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)
    return "optimizer.model.safetensors does not match its checksum"


def lose_a_file(folder: Path) -> str:
    (folder / "state.json").unlink()
    return "state.json is missing"


def lose_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "its manifest is missing or unreadable"


def tear_the_manifest(folder: Path) -> str:
    file = folder / "manifest.json"
    file.write_bytes(file.read_bytes()[:40])
    return "its manifest is missing or unreadable"


DAMAGES = [cut_short, flip_a_bit, lose_a_file, lose_the_manifest, tear_the_manifest]


@pytest.mark.parametrize("harm", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_it_is_said(harm, checkpoints):
    says = harm(checkpoints / "000020")
    before = contents(checkpoints)
    said: list[str] = []
    found = newest(checkpoints, said.append)
    assert found == checkpoints / "000010"
    assert same(read(found), snapshot(10))
    assert len(said) == 1 and "000020 is damaged" in said[0]
    with pytest.raises(AssertionError, match=says):
        nobody_speaks(said[0])
    assert contents(checkpoints) == before, "looking changes nothing"


@pytest.mark.parametrize("harm", DAMAGES)
def test_where_no_checkpoint_is_complete_the_run_is_refused_and_nothing_touched(harm, checkpoints):
    for folder in checkpoints.iterdir():
        harm(folder)
    before = contents(checkpoints)
    said: list[str] = []
    with pytest.raises(UserError, match="None of the 2 checkpoints .* Nothing was changed"):
        newest(checkpoints, said.append)
    assert len(said) == 2
    assert contents(checkpoints) == before


def test_no_flipped_bit_in_any_file_goes_unnoticed_or_ends_in_an_accident(checkpoints):
    folder = checkpoints / "000020"
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), 7):
            harmed = bytearray(whole)
            harmed[place] ^= 1 << (place % 8)
            file.write_bytes(harmed)
            problem = find_corruption(folder)
            if (
                file.name == "manifest.json" and problem is None
            ):  # a digit of its step or a space: nothing hangs on it
                assert same(read(folder), snapshot(20))
            else:
                assert problem is not None, (file.name, place)
        file.write_bytes(whole)
    assert find_corruption(folder) is None


def test_a_manifest_cannot_lead_out_of_its_folder(checkpoints):
    (checkpoints / "000010" / "manifest.json").write_text(
        json.dumps({"done": 10, "files": {"../000020/state.json": {"bytes": 1, "sha256": ""}}})
    )
    assert find_corruption(checkpoints / "000010") == "../000020/state.json is missing"


def test_nothing_is_unpickled(checkpoints, tmp_path):
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "exploded",))

    (checkpoints / "bomb.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="not a readable safetensors file"):
        checkpoint.tensors_in(checkpoints / "bomb.safetensors")
    assert not (tmp_path / "exploded").exists()
    found: list[str] = []
    watching = True
    sys.addaudithook(
        lambda event, _: found.append(event) if watching and event == "pickle.find_class" else None
    )
    pickle.loads(pickle.dumps(Path("a")))
    assert found, "the watch is awake"
    found.clear()
    read(checkpoints / "000020")
    watching = False  # a hook cannot be taken away again
    assert not found


# ----------------------------------------------------------------------------------------------------------- pruning


@pytest.mark.parametrize("keep", [set, lambda steps: {steps[0]}, lambda steps: {999}])
def test_the_newest_is_never_pruned_whatever_is_worth_keeping(keep, checkpoints):
    checkpoint.write(checkpoints, snapshot(30))
    prune(checkpoints, lambda steps: keep(steps) if keep is not set else set(), written=30)
    assert steps_in(checkpoints)[-1] == 30
    assert same(read(newest(checkpoints, nobody_speaks)), snapshot(30))


def test_the_only_checkpoint_is_never_pruned(tmp_path):
    checkpoint.write(tmp_path, snapshot(10))
    prune(tmp_path, lambda steps: set(), written=10)
    assert steps_in(tmp_path) == [10]


def test_a_damaged_newer_one_does_not_stand_in_for_the_one_just_written(checkpoints):
    """The run fell back to step 10, went on, and saved step 15: the ruin of step 20 is not "the
    newest" to keep."""
    cut_short(checkpoints / "000020")
    checkpoint.write(checkpoints, snapshot(15))
    for last, left in ((2, [10, 15, 20]), (1, [15, 20])):
        prune(checkpoints, lambda steps, last=last: set(steps[-last:]), written=15)
        assert steps_in(checkpoints) == left
        assert newest(checkpoints, lambda text: None) == checkpoints / "000015"


def test_a_writer_that_keeps_one_always_has_a_complete_one(checkpoints):
    cut_short(checkpoints / "000020")
    writer = Writer(checkpoints, lambda steps: set(steps[-1:]), on_failure=pytest.fail)
    for done in (12, 14):
        writer.begin(snapshot(done))
        assert writer.wait()
        assert same(read(newest(checkpoints, lambda text: None)), snapshot(done))
    writer.close()


def test_the_newest_the_best_and_the_multiples_are_worth_keeping(tmp_path):
    engine = toy_engine(tmp_path, keep_last=2, keep_every=40)
    for step, error in [
        (10, 0.5),
        (20, 0.1),
        (30, 0.3),
        (40, 0.2),
        (50, 0.2),
        (60, 0.4),
        (70, None),
    ]:
        engine.folder.log(
            {"step": step, "kind": "validation", "val_ema/error": error, "val/error": 0.0}
        )
    assert engine.worth_keeping([10, 20, 30, 40, 50, 60, 70]) == {20, 40, 60, 70}
    assert engine.worth_keeping([50, 60, 70]) == {50, 60, 70}, "the best of those that are left"


def test_a_run_keeps_its_newest_and_its_best_checkpoint(tmp_path):
    engine = toy_engine(tmp_path, steps=8, checkpoint_every=1, validate_every=1, keep_last=2)
    errors = iter([5.0, 1.0, 4.0, 3.0, 2.0, 2.0, 2.0, 2.0])
    engine.measured = lambda: {"error": engine_errors[engine.done]}
    engine_errors = dict(enumerate(errors, start=1))
    engine.run()
    assert steps_in(engine.folder.checkpoints) == [2, 7, 8]


# ------------------------------------------------------------------------------------------------------------ orphans


def test_what_an_interrupted_write_left_is_swept_and_nothing_else(checkpoints):
    for name in (".writing-000030", ".deleting-000010"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_text("half")
    (checkpoints / "notes").mkdir()
    (checkpoints / "notes" / "mine.txt").write_text("by hand")
    (checkpoints / ".hidden").write_text("mine too")
    assert steps_in(checkpoints) == [10, 20], "orphans do not look like checkpoints"
    checkpoint.write(checkpoints, snapshot(30))
    names = {entry.name for entry in checkpoints.iterdir()}
    assert names == {"000010", "000020", "000030", "notes", ".hidden"}


# --------------------------------------------------------------------------------------------------- strict restoring


def test_tensors_of_another_network_are_refused_with_both_sides_named():
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = {
        "0.weight": torch.zeros(3, 2),
        "0.bias": torch.zeros(4),
        "1.weight": torch.zeros(1, 3),
        "2.bias": torch.zeros(1),
    }
    with pytest.raises(UserError) as refused:
        restore_network(network, found, "model in the checkpoint")
    letter = str(refused.value)
    assert "model in the checkpoint comes from another network" in letter
    assert "1.bias is missing from the file" in letter
    assert "2.bias is in the file but not in the network" in letter
    assert "0.bias has shape (4,) in the file and (3,) in the network" in letter
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items()
    ), "not even in part"


def test_many_differences_are_counted_and_not_all_told():
    network = nn.Sequential(*[nn.Linear(1, 1) for _ in range(10)])
    with pytest.raises(UserError, match="and 12 more"):
        restore_network(network, {}, "model")


def test_a_matching_network_is_restored_exactly():
    network, other = nn.Linear(2, 3), nn.Linear(2, 3)
    weight = network.weight
    restore_network(network, other.state_dict(), "model")
    assert torch.equal(network.weight, other.weight) and network.weight is weight


# ------------------------------------------------------------------------------------------------------- a full disk


def to_fp32(tensors: dict[str, Tensor], path: Path, **_: Any) -> None:
    """Takes a part, as a disk does that becomes full."""
    path.write_bytes(b"half a file")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_is_told_and_the_old_ones_stay(checkpoints, monkeypatch):
    told: list[Exception] = []
    writer = Writer(checkpoints, KEEP_ALL, told.append)
    before = contents(checkpoints)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", to_fp32)
        writer.begin(snapshot(30))
        assert not writer.wait()
    assert [str(error) for error in told] == ["[Errno 28] No space left on device"]
    assert contents(checkpoints) == before, "not even a half-written file takes room"
    writer.begin(snapshot(40))
    assert writer.wait(), "and the next one is written as if nothing had been"
    writer.close()
    assert same(read(newest(checkpoints, nobody_speaks)), snapshot(40))


def test_a_failure_is_told_at_the_latest_when_the_next_write_begins(checkpoints, monkeypatch):
    told: list[Exception] = []
    writer = Writer(checkpoints, KEEP_ALL, told.append)
    monkeypatch.setattr(checkpoint, "save_file", to_fp32)
    writer.begin(snapshot(30))
    writer.begin(snapshot(40))
    assert len(told) == 1
    writer.close()
    assert len(told) == 2


def test_the_step_does_not_wait_for_the_disk_and_writes_stay_in_order(checkpoints, monkeypatch):
    here = threading.current_thread()
    wrote: list[tuple[int, bool]] = []
    really = checkpoint.write

    def noted(folder: Path, one: Snapshot) -> Path:
        wrote.append((one.done, threading.current_thread() is here))
        return really(folder, one)

    monkeypatch.setattr(checkpoint, "write", noted)
    writer = Writer(checkpoints, KEEP_ALL, on_failure=pytest.fail)
    for done in (30, 40, 50):
        writer.begin(snapshot(done))
    writer.close()
    assert wrote == [(30, False), (40, False), (50, False)]


# ------------------------------------------------------------------------------------------- death at every operation


class Killed(BaseException):
    """What a killed process would have done next. Nobody may catch it: the dead do not clean up."""


class Death:
    """Comes before the n-th file operation, or in the middle of it if it writes; from then on
    nothing reaches the disk."""

    def __init__(self, at: int):
        self.left = at

    def before(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def mortal(*args: Any, **kwargs: Any) -> Any:
            self.maybe()
            return act(*args, **kwargs)

        return mortal

    def halfway(self, act: Callable[..., Any], path_at: int) -> Callable[..., Any]:
        def mortal(*args: Any, **kwargs: Any) -> Any:
            self.maybe()
            done = act(*args, **kwargs)
            self.maybe(tear=args[path_at])
            return done

        return mortal

    def maybe(self, tear: Path | None = None) -> None:
        self.left -= 1
        if self.left == -1 and tear is not None:
            os.truncate(tear, os.path.getsize(tear) // 2)
        if self.left < 0:
            raise Killed

    def lurk(self, patched: pytest.MonkeyPatch) -> None:
        for name in ("replace", "mkdir", "rmdir", "unlink", "fsync"):
            patched.setattr(os, name, self.before(getattr(os, name)))
        patched.setattr(checkpoint, "save_file", self.halfway(checkpoint.save_file, path_at=1))
        patched.setattr(Path, "write_text", self.halfway(Path.write_text, path_at=0))


def dies(act: Callable[[], None], at: int) -> bool:
    """Does it, and dies at the file operation number `at`; False if it came to its end before."""
    with pytest.MonkeyPatch.context() as patched:
        Death(at).lurk(patched)
        try:
            act()
        except Killed:
            return True
        return False


def as_it_was(checkpoints: Path) -> None:
    """Nothing: the folder is in order."""


def in_disarray(checkpoints: Path) -> None:
    """A life of this run wrote step 30 before, which was found damaged, and others were killed in
    writing and deleting."""
    checkpoint.write(checkpoints, snapshot(30))
    cut_short(checkpoints / "000030")
    for name in (".writing-000030", ".deleting-000030", ".deleting-000005"):
        shutil.copytree(checkpoints / "000010", checkpoints / name)


@pytest.mark.parametrize("state", [as_it_was, in_disarray])
def test_killed_at_any_file_operation_there_is_the_old_one_or_the_new_one_complete(
    state, checkpoints, tmp_path
):
    state(checkpoints)

    def write_and_prune(folder: Path) -> None:
        checkpoint.write(folder, snapshot(30))
        prune(folder, lambda steps: set(steps[-1:]), written=30)

    outcomes: list[int] = []
    for at in range(200):
        place = tmp_path / f"killed at {at}"
        shutil.copytree(checkpoints, place)
        died = dies(lambda place=place: write_and_prune(place), at)
        found = newest(place, lambda text: None)
        assert found is not None
        outcomes.append(read(found).done)
        assert same(read(found), snapshot(outcomes[-1]))
        write_and_prune(place)  # the next life of the run
        assert [entry.name for entry in place.iterdir()] == ["000030"]
        assert same(read(newest(place, nobody_speaks)), snapshot(30))
        shutil.rmtree(place)
        if not died:
            break
    assert not died, "it came to its end"
    assert len(outcomes) > 20 and set(outcomes) == {20, 30}
    assert outcomes == sorted(outcomes), "once the new one is there, it stays"

"""A run's folder: what a kill, a full disk, a file in the way or a second run can do to it, which
is nothing."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tessera.run import directory as folder_module
from tessera.run.directory import RunDirectory, UserError, write_atomically

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    folder = RunDirectory(tmp_path / "run")
    folder.make()
    return folder


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files cannot grow beyond this many bytes: as on a full disk, a write fails after it has taken
    a part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ------------------------------------------------------------------------------------------------------------ making


def test_a_folder_is_made_with_its_parents_and_made_again_without_harm(tmp_path):
    folder = RunDirectory(tmp_path / "a" / "b" / "run")
    folder.make()
    (folder.checkpoints / "kept").write_text("x")
    folder.make()
    assert folder.samples.is_dir() and (folder.checkpoints / "kept").exists()


@pytest.mark.parametrize("below", ["", "run", "deep/run"])
def test_a_file_in_the_way_is_named_and_left_alone(below, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(UserError) as refused:
        RunDirectory(file / below).make()
    assert f"{file} is a file" in str(refused.value) and "--out" in str(refused.value)
    assert file.read_text() == "mine"


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_disk_that_cannot_be_written_is_told_when_the_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\).*--out"):
        RunDirectory(tmp_path / "run").make()


def test_a_disk_that_cannot_be_written_is_told_when_the_folder_is_locked(run, monkeypatch):
    monkeypatch.setattr(folder_module.os, "open", read_only)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
        run.lock()


def test_a_disk_that_cannot_be_written_is_told_when_the_settings_are_kept(run, monkeypatch):
    run.write_config({"recipe": "a"})
    monkeypatch.setattr(folder_module.os, "replace", read_only)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
        run.write_config({"recipe": "b"})
    assert run.read_config() == {"recipe": "a"}


def test_a_full_disk_is_told_when_the_folder_is_locked(run):
    with room_for(0), pytest.raises(UserError, match="cannot be written"):
        run.lock()


# -------------------------------------------------------------------------------------------------------------- lock

HOLD = """
import sys
from tessera.run.directory import RunFolder
folder = RunFolder(sys.argv[1])
folder.lock()
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_run_in(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder until it is let go."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate(timeout=30)


def test_a_second_run_is_kept_out_for_as_long_as_the_first_lives(run):
    with another_run_in(run.path) as holder:
        for _ in range(2):
            with pytest.raises(
                UserError, match=f"Another run is at work in .* \\(process {holder.pid}\\).*--out"
            ):
                run.lock()
        holder.kill()
        holder.wait(timeout=30)
        run.lock()  # a lock goes with its process, however that dies
    assert (run.path / "lock").read_text() == str(os.getpid())
    run.unlock()


def test_an_unlocked_folder_is_free_for_another_process(run):
    run.lock()
    run.unlock()
    with another_run_in(run.path), pytest.raises(UserError, match="Another run"):
        run.lock()


# ---------------------------------------------------------------------------------------------------------- settings


def test_settings_come_back_and_a_kill_leaves_the_old_ones(run, monkeypatch):
    run.write_config({"recipe": "a", "steps": 3})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run.write_config({"recipe": "b"})
    assert run.read_config() == {"recipe": "a", "steps": 3}


def test_where_there_is_no_run_it_is_said_why(tmp_path, run):
    with pytest.raises(UserError, match="no such folder"):
        RunDirectory(tmp_path / "nowhere").read_config()
    with pytest.raises(UserError, match=r"it has no config\.json"):
        run.read_config()


@pytest.mark.parametrize("text", ["", "{", '{"a": }', "\x00"])
def test_settings_that_are_no_json_are_refused(text, run):
    run.config.write_text(text)
    with pytest.raises(UserError, match=r"config\.json is not readable as JSON"):
        run.read_config()


@pytest.mark.parametrize("text", ["[]", "3", '"images-vqgan"', "null"])
def test_settings_that_are_no_group_of_settings_are_refused(text, run):
    run.config.write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        run.read_config()


def test_a_file_written_atomically_is_the_old_one_or_the_new_one(tmp_path):
    file = tmp_path / "card.md"
    write_atomically(file, "old")
    with room_for(2), pytest.raises(OSError):
        write_atomically(file, "new and longer")
    assert file.read_text() == "old"
    write_atomically(file, "new: ü")
    assert file.read_text(encoding="utf-8") == "new: ü"
    assert [path.name for path in tmp_path.iterdir()] == ["card.md"]


# ----------------------------------------------------------------------------------------------------------- numbers


def line(step: int, kind: str = "train", **numbers: object) -> dict:
    return {"step": step, "kind": kind, **numbers}


def test_numbers_come_back_exactly_and_those_that_are_none_as_none(run):
    loss = 0.1 + 0.2
    assert run.log(line(1, loss=loss, nan=float("nan"), infinite=float("-inf"), count=3))
    assert run.records() == [line(1, loss=loss, nan=None, infinite=None, count=3)]
    json.loads(
        run.metrics.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )


def test_records_can_be_asked_for_by_kind(run):
    for step in (1, 2):
        run.log(line(step, note='"validation"'))
        run.log(line(step, "validation", psnr=20.0))
    assert [record["psnr"] for record in run.records("validation")] == [20.0, 20.0]
    assert len(run.records("train")) == 2 and len(run.records()) == 4


def test_a_line_torn_by_a_kill_is_no_line(run):
    run.log(line(1))
    with open(run.metrics, "a") as file:
        file.write('{"step": 2, "ki')
    assert run.records() == [line(1)]
    run.forget_after(1)
    assert run.log(line(2))
    assert run.records() == [line(1), line(2)]


def test_a_resumed_run_forgets_the_steps_it_will_do_again(run):
    for step in (1, 2, 3, 4):
        run.log(line(step))
    run.log(line(4, "validation"))
    run.forget_after(2)
    assert run.records() == [line(1), line(2)]
    run.forget_after(2)
    assert run.records() == [line(1), line(2)]


def test_a_new_run_has_nothing_to_forget(run):
    run.forget_after(0)
    assert run.records() == [] and not run.metrics.exists()


def test_lines_that_a_full_disk_refuses_are_written_once_there_is_room(run):
    """Although the disk takes half a line before it is full."""
    assert run.log(line(1))
    before = run.metrics.read_bytes()
    with room_for(len(before) + 11):
        assert not run.log(line(2))
        assert not run.log(line(3))
        assert run.metrics.read_bytes() == before, "what was taken in part was taken back"
        assert [record["step"] for record in run.records("train")] == [1, 2, 3], (
            "those that wait are records too"
        )
    assert run.log(line(4))
    assert run.records() == [line(step) for step in (1, 2, 3, 4)]
    assert len(run.metrics.read_text().splitlines()) == 4


# ---------------------------------------------------------------------------------------------------------- journals


def test_journals_come_back(run):
    assert run.noted("rejected.jsonl") == []
    run.note("rejected.jsonl", {"example": "a.png", "reason": "empty"})
    run.note("rejected.jsonl", {"example": "ü.png", "reason": "empty"})
    assert [one["example"] for one in run.noted("rejected.jsonl")] == ["a.png", "ü.png"]


def test_a_journal_on_a_full_disk_loses_a_line_and_nothing_more(run):
    """A torn line in it would otherwise keep the run from ever starting again."""
    run.note("rejected.jsonl", {"example": "a.png"})
    with room_for((run.path / "rejected.jsonl").stat().st_size + 5):
        run.note("rejected.jsonl", {"example": "b.png"})
    run.note("rejected.jsonl", {"example": "c.png"})
    assert [one["example"] for one in run.noted("rejected.jsonl")] == ["a.png", "c.png"]


def test_a_journal_torn_by_a_power_cut_can_still_be_read(run):
    run.note("rejected.jsonl", {"example": "a.png"})
    with open(run.path / "rejected.jsonl", "a") as file:
        file.write('{"exam')
    assert [one["example"] for one in run.noted("rejected.jsonl")] == ["a.png"]


# ----------------------------------------------------------------------------------------------------------- samples


def test_samples_appear_whole_or_not_at_all(run):
    with pytest.raises(OSError), run.writing_samples("000010") as place:
        (place / "0000.png").write_text("half")
        raise OSError(errno.ENOSPC, "full")
    assert list(run.samples.iterdir()) == []
    with run.writing_samples("000010") as place:
        assert not (run.samples / "000010").exists()
        (place / "0000.png").write_text("whole")
    assert (run.samples / "000010" / "0000.png").read_text() == "whole"


def test_samples_of_a_life_that_was_cut_short_are_replaced_whole(run):
    for text in ("first", "second"):
        with run.writing_samples("000010") as place:
            (place / f"{text}.png").write_text(text)
    assert [path.name for path in (run.samples / "000010").iterdir()] == ["second.png"]
    assert [path.name for path in run.samples.iterdir()] == ["000010"]

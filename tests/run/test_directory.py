"""The run directory survives kills, full disks, files in its path and a second run."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tessera.run import directory as directory_module
from tessera.run.directory import (
    RunDirectory,
    append_text,
    check_sample_folder,
    move_earlier_samples,
    next_free_folder,
    write_atomically,
)
from tessera.run.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Let writes beyond this many bytes fail after a part was written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- creating


def test_a_directory_is_created_with_its_parents_and_only_once(tmp_path):
    directory = RunDirectory(tmp_path / "a" / "b" / "run")
    directory.create()
    (directory.checkpoints / "kept").write_text("x")
    directory.create()
    assert directory.samples.is_dir() and (directory.checkpoints / "kept").exists()


@pytest.mark.parametrize("below", ["", "run", "deep/run"])
def test_a_file_in_the_path_is_named_and_left_unchanged(below, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(UserError) as raised:
        RunDirectory(file / below).create()
    assert f"{file} is a file" in str(raised.value) and "--out" in str(raised.value)
    assert file.read_text() == "mine"


def test_a_run_has_started_once_a_step_left_anything(run):
    assert not run.has_started
    run.write_config({"recipe": "a"})
    run.lock()
    run.unlock()
    assert not run.has_started, "settings and the lock are written before the first step"
    for path in (run.metrics, run.checkpoints / "000001", run.samples / "000001"):
        path.touch()
        assert run.has_started
        path.unlink()
        assert not run.has_started


def raise_read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_creating_on_a_read_only_disk_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", raise_read_only)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\).*--out"):
        RunDirectory(tmp_path / "run").create()


def test_locking_on_a_read_only_disk_is_a_user_error(run, monkeypatch):
    monkeypatch.setattr(directory_module.os, "open", raise_read_only)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
        run.lock()


def test_writing_settings_on_a_read_only_disk_keeps_the_old_ones(run, monkeypatch):
    run.write_config({"recipe": "a"})
    monkeypatch.setattr(directory_module.os, "replace", raise_read_only)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
        run.write_config({"recipe": "b"})
    assert run.read_config() == {"recipe": "a"}


def test_locking_on_a_full_disk_is_a_user_error(run):
    with limit_file_size(0), pytest.raises(UserError, match="cannot be written"):
        run.lock()


# ---- locking

HOLD_LOCK = """
import sys
from tessera.run.directory import RunDirectory
directory = RunDirectory(sys.argv[1])
directory.lock()
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked_by_another_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(path)],
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
        holder.communicate(timeout=600)


def test_a_second_run_is_locked_out_until_the_first_ends(run):
    with locked_by_another_process(run.path) as holder:
        for _ in range(2):
            with pytest.raises(
                UserError, match=f"Another run uses .* \\(process {holder.pid}\\).*--out"
            ):
                run.lock()
        holder.kill()
        holder.wait(timeout=600)
        run.lock()  # a lock ends with its process, also after a kill
    assert (run.path / "lock").read_text() == str(os.getpid())
    run.unlock()


def test_an_unlocked_directory_can_be_locked_by_another_process(run):
    run.lock()
    run.unlock()
    with locked_by_another_process(run.path), pytest.raises(UserError, match="Another run"):
        run.lock()


# ---- configuration


def test_a_kill_while_writing_settings_keeps_the_old_ones(run, monkeypatch):
    run.write_config({"recipe": "a", "steps": 3})

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directory_module.os, "replace", kill)
    with pytest.raises(KeyboardInterrupt):
        run.write_config({"recipe": "b"})
    assert run.read_config() == {"recipe": "a", "steps": 3}


def test_a_folder_without_a_run_is_reported_with_the_reason(tmp_path, run):
    with pytest.raises(UserError, match="the folder does not exist"):
        RunDirectory(tmp_path / "missing").read_config()
    with pytest.raises(UserError, match=r"it has no config\.json"):
        run.read_config()


@pytest.mark.parametrize("text", ["", "{", '{"a": }', "\x00"])
def test_settings_that_are_not_json_are_rejected(text, run):
    run.config.write_text(text)
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        run.read_config()


@pytest.mark.parametrize("text", ["[]", "3", '"images-vqgan"', "null"])
def test_settings_that_are_not_a_json_object_are_rejected(text, run):
    run.config.write_text(text)
    with pytest.raises(UserError, match=r"config\.json must hold a JSON object, got"):
        run.read_config()


def test_class_names_are_read_if_the_run_has_any(run):
    assert run.read_classes() == []
    (run.path / "classes.json").write_text('["dog", "Käfer"]', encoding="utf-8")
    assert run.read_classes() == ["dog", "Käfer"]


def test_an_atomic_write_leaves_the_old_file_or_the_new_one(tmp_path):
    file = tmp_path / "card.md"
    write_atomically(file, "old")
    with limit_file_size(2), pytest.raises(OSError):
        write_atomically(file, "new and longer")
    assert file.read_text() == "old"
    write_atomically(file, "new: ü")
    assert file.read_text(encoding="utf-8") == "new: ü"
    assert [path.name for path in tmp_path.iterdir()] == ["card.md"]


def test_text_is_appended_completely_or_not_at_all(tmp_path):
    file = tmp_path / "lines.txt"
    append_text(file, "first ü\n")
    with limit_file_size(file.stat().st_size + 3), pytest.raises(OSError):
        append_text(file, "second\n")
    assert file.read_text(encoding="utf-8") == "first ü\n"
    append_text(file, "third\n")
    assert file.read_text(encoding="utf-8") == "first ü\nthird\n"


# ---- metrics


def make_record(step: int, kind: str = "train", **values: object) -> dict[str, Any]:
    return {"step": step, "kind": kind, **values}


def test_numbers_are_read_exactly_and_non_finite_ones_as_null(run):
    loss = 0.1 + 0.2
    assert run.log(make_record(1, loss=loss, nan=float("nan"), inf=float("-inf"), count=3))
    assert run.read_records() == [make_record(1, loss=loss, nan=None, inf=None, count=3)]
    json.loads(
        run.metrics.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )


def test_records_can_be_selected_by_kind(run):
    for step in (1, 2):
        run.log(make_record(step, note='"validation"'))
        run.log(make_record(step, "validation", psnr=20.0))
    assert [record["psnr"] for record in run.read_records("validation")] == [20.0, 20.0]
    assert len(run.read_records("train")) == 2 and len(run.read_records()) == 4


def test_a_line_cut_short_by_a_kill_is_ignored(run):
    run.log(make_record(1))
    with open(run.metrics, "a") as file:
        file.write('{"step": 2, "ki')
    assert run.read_records() == [make_record(1)]
    run.truncate_after(1)
    assert run.log(make_record(2))
    assert run.read_records() == [make_record(1), make_record(2)]


def test_records_of_steps_that_will_be_repeated_are_removed(run):
    for step in (1, 2, 3, 4):
        run.log(make_record(step))
    run.log(make_record(4, "validation"))
    for _ in range(2):
        run.truncate_after(2)
        assert run.read_records() == [make_record(1), make_record(2)]


def test_a_new_run_has_no_records_to_remove(run):
    run.truncate_after(0)
    assert run.read_records() == [] and not run.metrics.exists()


def test_lines_that_do_not_fit_on_the_disk_are_written_later(run):
    """The disk accepts a part of a line before it is full."""
    assert run.log(make_record(1))
    before = run.metrics.read_bytes()
    with limit_file_size(len(before) + 11):
        assert not run.log(make_record(2))
        assert not run.log(make_record(3))
        assert run.metrics.read_bytes() == before, "the partial line was removed"
        assert [record["step"] for record in run.read_records("train")] == [1, 2, 3], (
            "lines that are not yet written are records too"
        )
    assert run.log(make_record(4))
    assert run.read_records() == [make_record(step) for step in (1, 2, 3, 4)]
    assert len(run.metrics.read_text().splitlines()) == 4


# ---- notes


def test_notes_are_read_as_they_were_written(run):
    assert run.read_notes("rejected.jsonl") == []
    run.note("rejected.jsonl", {"example": "a.png", "reason": "empty"})
    run.note("rejected.jsonl", {"example": "ü.png", "reason": "empty"})
    assert [one["example"] for one in run.read_notes("rejected.jsonl")] == ["a.png", "ü.png"]


def test_a_full_disk_costs_one_note_and_nothing_else(run):
    """A partial line would prevent the run from ever starting again."""
    run.note("rejected.jsonl", {"example": "a.png"})
    with limit_file_size((run.path / "rejected.jsonl").stat().st_size + 5):
        run.note("rejected.jsonl", {"example": "b.png"})
    run.note("rejected.jsonl", {"example": "c.png"})
    assert [one["example"] for one in run.read_notes("rejected.jsonl")] == ["a.png", "c.png"]


def test_a_note_cut_short_by_a_power_failure_is_ignored(run):
    run.note("rejected.jsonl", {"example": "a.png"})
    with open(run.path / "rejected.jsonl", "a") as file:
        file.write('{"exam')
    assert [one["example"] for one in run.read_notes("rejected.jsonl")] == ["a.png"]


# ---- samples


def test_samples_appear_completely_or_not_at_all(run):
    with pytest.raises(OSError), run.writing_samples("000010") as folder:
        (folder / "0000.png").write_text("partial")
        raise OSError(errno.ENOSPC, "full")
    assert list(run.samples.iterdir()) == []
    with run.writing_samples("000010") as folder:
        assert not (run.samples / "000010").exists()
        (folder / "0000.png").write_text("complete")
    assert (run.samples / "000010" / "0000.png").read_text() == "complete"


def test_samples_of_an_earlier_attempt_are_replaced_completely(run):
    for text in ("first", "second"):
        with run.writing_samples("000010") as folder:
            (folder / f"{text}.png").write_text(text)
    assert [path.name for path in (run.samples / "000010").iterdir()] == ["second.png"]
    assert [path.name for path in run.samples.iterdir()] == ["000010"]


def test_samples_are_written_only_among_other_samples(tmp_path):
    new, photos, file = tmp_path / "new", tmp_path / "photos", tmp_path / "file"
    assert check_sample_folder(new) == new and not new.exists()
    photos.mkdir()
    assert check_sample_folder(photos) == photos, "an empty folder"
    (photos / "a.png").touch()
    file.touch()
    for path in (photos, file):
        with pytest.raises(UserError, match=f"{path} holds files that are not samples.*--out"):
            check_sample_folder(path)
    (photos / "settings.json").write_text('{"theme": "dark"}')
    with pytest.raises(UserError, match="not samples"):
        check_sample_folder(photos)
    (photos / "settings.json").write_text('{"run": "runs/a", "step": 2, "count": 1}')
    assert check_sample_folder(photos) == photos, "a folder with earlier samples"


def test_earlier_samples_are_moved_into_numbered_folders(tmp_path):
    assert move_earlier_samples(tmp_path) is None
    for number in (1, 2):
        (tmp_path / "0000.png").write_text(f"set {number}")
        moved = move_earlier_samples(tmp_path)
        assert moved == tmp_path / f"earlier-00{number}"
        assert (moved / "0000.png").read_text() == f"set {number}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier-001", "earlier-002"]
    assert move_earlier_samples(tmp_path) is None, "moved samples are not moved again"
    assert next_free_folder(tmp_path, "earlier") == tmp_path / "earlier-003"


def test_reading_validations_needs_no_memory_for_the_other_records(tmp_path):
    directory = RunDirectory(tmp_path)
    line = json.dumps({"step": 1, "kind": "train", "text": "x" * 1000}) + "\n"
    validation = json.dumps({"step": 2, "kind": "validation"}) + "\n"
    directory.metrics.write_text(line * 4000 + validation, encoding="utf-8")
    tracemalloc.start()
    try:
        records = directory.read_records("validation")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert records == [{"step": 2, "kind": "validation"}]
    assert peak_bytes < 400_000  # of a file of 4 MB

"""Odd paths, names, captions and outputs: a message each, and no traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tessera.cli.launch import ForgivingStream
from tessera.data.captions import Captions
from tessera.data.discovery import list_files
from tessera.engine import engine as engine_module
from tessera.run.directory import RunDirectory
from tessera.run.errors import printable
from tests.cli_runner import run_invalid, tessera
from tests.runs import read_metrics, read_samples, tiny, train
from tests.test_bad_input import write_images

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ("train", "images-vqgan", "--preset", "tiny")


# ---- paths


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", "must not be empty"),
        ("~nosuch", "cannot be opened"),
        ("x" * 300, "cannot be opened"),
        ("a/" * 3000, "cannot be opened"),
    ],
)
def test_paths_that_cannot_exist_get_a_message(path, expected, tmp_path):
    message = run_invalid(*TRAIN, "--data", path, "--out", tmp_path / "run")
    assert expected in message
    result = tessera("check", path)
    assert result.code in (1, 2) and "Traceback" not in result.err


def test_an_output_folder_with_an_odd_name_gets_a_message(tmp_path):
    assert "is empty" in run_invalid(*TRAIN, "--out", "")
    result = tessera(*TRAIN, "--out", tmp_path / ("x" * 300))
    assert result.code in (1, 2) and "File name too long" in result.text


@pytest.mark.parametrize("flag", ["--steps", "--batch-size", "--seed", "--keep-every"])
def test_numbers_beyond_64_bits_are_rejected(flag, tmp_path):
    message = run_invalid(*TRAIN, flag, str(2**70), "--out", tmp_path / "run")
    assert "must be" in message and not (tmp_path / "run").exists()


def test_links_that_lead_nowhere_are_reported_and_skipped(tmp_path):
    write_images(tmp_path, 4)
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "missing.png").symlink_to(tmp_path / "nowhere")
    result = tessera("check", tmp_path)
    assert result.code == 0 and "6 images, 4 usable" in result.text
    assert "self.png: the file cannot be opened (Too many levels of symbolic links)" in result.text


# ---- names


def test_names_that_are_no_text_are_read_and_shown_escaped(tmp_path):
    write_images(tmp_path / "data", 3)
    odd = [b"caf\xe9.png", b"\x1b[31mred.png", "\u202egnp.png".encode()]
    for name, source in zip(odd, sorted((tmp_path / "data").iterdir())):
        source.rename(
            os.path.join(os.fsencode(tmp_path / "data"), name).decode("utf-8", "surrogateescape")
        )
    (tmp_path / "data" / "\x1b[2Jbad.png").write_bytes(b"no image")
    result = tessera("check", tmp_path / "data")
    assert result.code == 0 and "4 images, 3 usable" in result.text
    assert "\x1b" not in result.out and "\\x1b[2Jbad.png" in result.out
    flags = ("--batch-size", "2", "--steps", "2", "--data.val-fraction", "0")
    trained = tessera(*TRAIN, "--data", tmp_path / "data", *flags, "--out", tmp_path / "run")
    assert trained.code == 0, trained.err
    assert "\x1b" not in trained.out


def test_control_characters_and_halves_of_characters_are_escaped():
    assert printable("a\x1b[31mb\udce9\n\u202e") == "a\\x1b[31mb\\udce9\n\\u202e"
    assert printable("Grün, 音楽 🎵") == "Grün, 音楽 🎵"


def test_captions_with_halves_of_characters_become_text(tmp_path):
    metadata = {"a.png": ("lone \ud800 half",)}
    captions = Captions(tmp_path, frozenset(), metadata, by_folder=False)
    assert captions.get("a.png") == "lone ? half"


# ---- a folder that grows, and one that contains the run


def test_runs_inside_a_folder_are_not_data(tmp_path):
    write_images(tmp_path / "data", 10)
    out = tmp_path / "data" / "run"
    flags = ("--steps", "2", "--sample-every", "1", "--out", out)
    assert tessera(*TRAIN, "--data", tmp_path / "data", *flags).code == 0
    assert list((out / "samples").rglob("*.png"))
    assert list_files(tmp_path / "data") == [f"{number:03d}.png" for number in range(10)]


def test_files_that_are_added_later_change_nothing_until_requested(tmp_path):
    data = write_images(tmp_path / "data", 12)
    command = (*TRAIN, "--data", data, "--batch-size", "4", "--log-every", "1")
    assert tessera(*command, "--steps", "4", "--out", tmp_path / "whole").code == 0
    assert tessera(*command, "--steps", "2", "--out", tmp_path / "grown").code == 0
    for number in range(5):
        image = PIL.Image.fromarray(np.full((24, 24, 3), 50 * number, np.uint8))
        image.save(data / f"new{number}.png")
    result = tessera(*command, "--steps", "4", "--out", tmp_path / "grown")
    assert result.code == 0 and "5 file(s) were added" in result.text
    validations = [r for r in read_metrics(tmp_path / "grown") if r["kind"] == "train"]
    assert validations == [r for r in read_metrics(tmp_path / "whole") if r["kind"] == "train"]
    rescanned = tessera(*command, "--steps", "5", "--data.rescan", "--out", tmp_path / "grown")
    assert rescanned.code == 0 and "were added" not in rescanned.text
    stored = json.loads((tmp_path / "grown" / "files.json").read_text())
    assert {f"new{number}.png" for number in range(5)} <= set(stored["files"])


# ---- outputs that fail


class FailingStream:
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        raise BrokenPipeError

    def fileno(self) -> int:
        raise ValueError


def test_a_run_survives_an_output_that_cannot_be_written():
    stream = ForgivingStream(FailingStream())
    assert stream.write("step 1") == 6
    stream.flush()


def test_a_run_goes_on_after_the_program_that_reads_its_output_has_ended(tmp_path):
    command = [sys.executable, "-m", "tessera", *TRAIN, "--steps", "30", "--validate-every", "5"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(3600) == 0, errors
    assert "Traceback" not in errors
    assert (tmp_path / "run" / "checkpoints" / "000030").is_dir()


def test_a_failed_flush_of_the_metrics_does_not_end_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(RunDirectory, "fsync_metrics", lambda self: "Input/output error")
    train(tmp_path / "run", tiny("images-vqgan", steps=2))
    assert "may not be on the disk (Input/output error)" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / "000002").is_dir()


def test_audio_samples_on_a_full_disk_do_not_end_a_run(tmp_path, monkeypatch, capsys):
    write = Path.write_bytes

    def fail(path: Path, data: Any) -> int:
        if path.suffix == ".wav":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    train(tmp_path / "run", tiny("audio-codec", steps=1, sample_count=1))
    assert "could not be written" in capsys.readouterr().out
    assert read_samples(tmp_path / "run") == {}


def test_a_disk_that_is_full_before_the_first_step_of_a_generator_gets_a_message(
    tmp_path, monkeypatch
):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    from tessera.run import dependencies

    monkeypatch.setattr(dependencies, "publish", fail)
    from tests.runs import tokenizer

    flags = ("--tokenizer", tokenizer(), "--out", tmp_path / "run")
    message = run_invalid("train", "images-maskgit", "--preset", "tiny", *flags)
    assert "cannot be written (No space left on device)" in message


# ---- damaged lines


def test_damaged_lines_are_left_out_and_named(tmp_path, capsys):
    run = tiny("images-vqgan", steps=4, checkpoint_every=2, log_every=1, validate_every=2)
    train(tmp_path / "whole", run)
    train(tmp_path / "run", tiny("images-vqgan", steps=2, log_every=1, validate_every=2))
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().split(b"\n")
    damaged = [lines[0].replace(b'"step"', b'"stex"'), b"\xff\xfe{", b"[1]", b'"', *lines]
    metrics.write_bytes(b"\n".join(damaged))
    for name in ("rejected.jsonl", "nonfinite.jsonl", "alarms.jsonl"):
        (tmp_path / "run" / name).write_bytes(b'{"stex": 1}\n\xff\n{"example": "a.png"}\n')
    capsys.readouterr()
    train(tmp_path / "run", run)
    output = capsys.readouterr().out
    assert "metrics.jsonl: 4 damaged line(s) were removed (1, 2, 3, 4)" in " ".join(output.split())
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")
    assert engine_module.checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [2, 4]

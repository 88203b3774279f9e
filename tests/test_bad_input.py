"""Bad input gets a clear sentence, and nothing is lost: one test for each thing that people run
into.

Each gives the command line what went wrong, and looks for what the letter must say and for every
byte that was there before. What a letter says in detail is tested where it is written.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.engine import checkpoint
from tessera.engine.checkpoint import find_corruption, list_steps
from tessera.run.directory import RunDirectory
from tests.cli_runner import files, run_invalid, tessera

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ("train", "images-vqgan", "--preset", "tiny")


def paint(folder: Path, count: int, size: int = 24) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (size, size, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run with the checkpoints of steps 2 and 4; tests work on copies of it."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    assert tessera(*TRAIN, "--steps", "4", "--checkpoint-every", "2", "--out", run).code == 0
    assert list_steps(run / "checkpoints") == [2, 4]
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


# --------------------------------------------------------------------------------------------------------------- data


def test_a_missing_folder(tmp_path):
    letter = run_invalid(*TRAIN, "--data", tmp_path / "nowhere", "--out", tmp_path / "run")
    assert (
        f"There is nothing at {tmp_path / 'nowhere'}" in letter
        and "give a folder of pictures" in letter
    )
    assert not (tmp_path / "run").exists(), "and no folder of a run that never began"


def test_an_empty_folder(tmp_path):
    (tmp_path / "data").mkdir()
    letter = run_invalid(*TRAIN, "--data", tmp_path / "data", "--out", tmp_path / "run")
    assert "holds no pictures" in letter and ".png" in letter and "the folder is empty" in letter
    assert not (tmp_path / "run").exists()


def test_a_folder_of_other_things(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "song.mp3").write_bytes(b"la")
    assert "there are only 1 .mp3" in run_invalid(
        *TRAIN, "--data", tmp_path / "data", "--out", tmp_path / "run"
    )
    assert files(tmp_path / "data") == {str(tmp_path / "data" / "song.mp3"): b"la"}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_folder_of_broken_files(num_workers, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(20):
        (data / f"{number}.png").write_bytes(b"no picture")
    before = files(data)
    letter = run_invalid(
        *TRAIN, "--data", data, "--num-workers", num_workers, "--out", tmp_path / "run"
    )
    assert (
        "could not be read" in letter
        and "not a PNG" in letter
        and "`tessera check` tells" in letter
    )
    assert files(data) == before and list_steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize("workers", ["0", "1"])
def test_one_broken_file_in_a_hundred(num_workers, tmp_path):
    """The run completes, and the file is told once, however often it comes up and however often the
    run is resumed."""
    data = paint(tmp_path / "data", 99)
    whole = (data / "007.png").read_bytes()
    (data / "broken.png").write_bytes(whole[: len(whole) // 2])
    command = (
        *TRAIN,
        "--data",
        data,
        "--num-workers",
        num_workers,
        "--batch-size",
        "16",
        "--out",
        tmp_path / "run",
    )
    said = [tessera(*command, "--validate-every", "4", "--steps", steps) for steps in ("6", "10")]
    assert [one.code for one in said] == [0, 0]
    assert [one.out.count("Left out broken.png") for one in said] == [1, 0]
    (line,) = RunDirectory(tmp_path / "run").read_notes("rejected.jsonl")
    assert line["example"] == "broken.png" and line["reason"]
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == 10


def test_pictures_smaller_than_asked(tmp_path):
    """They are enlarged, as their setting says; or left out, if that is asked for, and then there
    are none."""
    data = paint(tmp_path / "data", 12, size=8)
    before = files(data)
    assert tessera(*TRAIN, "--data", data, "--steps", "1", "--out", tmp_path / "run").code == 0
    letter = run_invalid(*TRAIN, "--data", data, "--data.on-small", "skip", "--out", tmp_path / "other")
    assert "it is 8 x 8, smaller than the 16 asked for" in letter
    assert files(data) == before


def test_fewer_pictures_than_a_batch(tmp_path):
    data = paint(tmp_path / "data", 6)
    letter = run_invalid(*TRAIN, "--data", data, "--data.val-fraction", "0", "--out", tmp_path / "run")
    assert (
        "A batch takes 8 examples, but the training set has 6. Use --batch-size 6 or less" in letter
    )
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------------------- asks


def test_an_unknown_recipe():
    assert "There is no recipe 'image-vqgan': did you mean 'images-vqgan'?" in run_invalid(
        "train", "image-vqgan"
    )


def test_an_unknown_flag(tmp_path):
    letter = run_invalid(*TRAIN, "--batch-sise", "4", "--out", tmp_path / "run")
    assert "--batch-sise" in letter and "Perhaps you meant: --batch-size" in letter
    assert not (tmp_path / "run").exists()


def test_a_size_that_the_stride_does_not_divide(tmp_path):
    letter = run_invalid(*TRAIN, "--data.size", "30", "--out", tmp_path / "run")
    assert "image size is 30" in letter and "multiple of 4: use 28 or 32" in letter
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--quantizer", "lfq", "--task.model.quantizer.codebook-size", "1000"],
            "must be a power of two: use 512 or 1024",
        ),
        (["--quantizer", "bsq", "--task.model.quantizer.codebook-size", "1"], "must be a power of two"),
        (["--quantizer", "vq", "--task.model.quantizer.codebook-size", "1"], "use 2 or more"),
        (["--task.model.quantizer.levels", "8", "1"], "two or more"),
    ],
)
def test_a_codebook_that_cannot_be(flags, says, tmp_path):
    assert says in run_invalid(*TRAIN, *flags, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_processes_that_a_batch_cannot_be_dealt_to(tmp_path):
    """Told before any of them is started."""
    letter = run_invalid(*TRAIN, "--nproc", "3", "--out", tmp_path / "run")
    assert "A batch of 8 examples" in letter and "3 process(es): use a batch size of 9" in letter
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["features.0.weight"], "features.0.bias (64,) is expected and missing"),
        (["conv1.weight"], "features.0.weight (64, 3, 3, 3) is expected and missing"),
    ],
)
def test_a_vgg_file_with_other_names(names, says, tmp_path):
    file = tmp_path / "vgg16.safetensors"
    save_file({name: torch.zeros(2, 2) for name in names}, file)
    letter = run_invalid(*TRAIN, "--perceptual", file, "--out", tmp_path / "run")
    assert f"{file} does not contain the weights of this network" in letter and says in letter
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"no tensors at all"])
def test_a_vgg_file_that_is_none(content, tmp_path):
    file = tmp_path / "vgg16.pth"
    file.write_bytes(content)
    assert "could not be read as a file of tensors" in run_invalid(
        *TRAIN, "--perceptual", file, "--out", tmp_path / "run"
    )
    assert "does not exist" in run_invalid(
        *TRAIN, "--perceptual", tmp_path / "none.pth", "--out", tmp_path / "run"
    )
    assert file.read_bytes() == content and not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------- checkpoints


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    file = folder / "ema.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)


HARMS = pytest.mark.parametrize(
    ("harm", "says"), [(cut_short, "bytes instead of"), (flip_a_bit, "checksum")]
)


@HARMS
def test_a_damaged_checkpoint_is_passed_over_and_the_run_goes_on_from_the_one_before(
    harm, says, run
):
    harm(run / "checkpoints" / "000004")
    older = files(run / "checkpoints" / "000002")
    said = tessera(*TRAIN, "--steps", "6", "--out", run)
    assert said.code == 0 and says in said.out
    assert "Checkpoint 000004 is damaged" in said.out and "Going on from step 2." in said.out
    assert find_corruption(run / "checkpoints" / "000006") is None
    assert files(run / "checkpoints" / "000002") in ({}, older), "pruned in its turn or untouched"
    assert [record["step"] for record in RunDirectory(run).read_records("train")] == [1, 2, 3, 4, 5, 6]


@HARMS
def test_a_run_whose_every_checkpoint_is_damaged_is_refused_and_left_as_it_is(harm, says, run):
    for folder in (run / "checkpoints").iterdir():
        harm(folder)
    before = files(run / "checkpoints", run / "samples")
    letter = run_invalid(*TRAIN, "--steps", "6", "--out", run)
    assert (
        "None of the 2 checkpoints" in letter
        and "Nothing was changed" in letter
        and "--fresh" in letter
    )
    assert files(run / "checkpoints", run / "samples") == before
    assert len(RunDirectory(run).read_records("train")) == 4
    for verb in ("sample", "evaluate"):
        assert "None of the 2 checkpoints" in run_invalid(verb, run)


@HARMS
def test_the_other_verbs_fall_back_too_and_say_so(harm, says, run, tmp_path):
    harm(run / "checkpoints" / "000004")
    said = tessera("sample", run, "--count", "2", "--out", tmp_path / "made")
    assert said.code == 0 and "000004 is damaged" in said.err and "step 2" in said.out


def sealed(folder: Path) -> None:
    """Gives a checkpoint that was tampered with a manifest that fits it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: checkpoint._described(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_of_another_model(run):
    for folder in (run / "checkpoints").iterdir():
        for name in ("model", "ema"):
            tensors = load_file(folder / f"{name}.safetensors")
            tensors["encoder.0.weight"] = torch.zeros(7, 3, 5, 5)
            tensors["encoder.stranger"] = torch.zeros(1)
            del tensors["encoder.0.bias"]
            save_file(tensors, folder / f"{name}.safetensors")
        sealed(folder)
    before = files(run / "checkpoints", run / "samples")
    for command in ((*TRAIN, "--steps", "6", "--out", run), ("sample", run), ("evaluate", run)):
        letter = run_invalid(*command)
        assert "comes from another network" in letter
        assert "encoder.0.bias is missing from the file" in letter
        assert "encoder.stranger is in the file but not in the network" in letter
        assert (
            "encoder.0.weight has shape (7, 3, 5, 5) in the file and (16, 3, 5, 5) in the network"
            in letter
        )
    assert files(run / "checkpoints", run / "samples") == before
    assert len(RunDirectory(run).read_records("train")) == 4


# ------------------------------------------------------------------------------------------------------------- the disk


def test_a_disk_that_is_full_in_a_save(run, monkeypatch):
    """The run goes on, says so, and keeps the old checkpoint; when there is room again, it
    saves."""
    really, attempts = checkpoint.save_file, []

    def full_once(*args: Any, **kwargs: Any) -> None:
        attempts.append(list_steps(run / "checkpoints"))
        if len(attempts) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        really(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", full_once)
    said = tessera(*TRAIN, "--steps", "8", "--checkpoint-every", "2", "--out", run)
    assert said.code == 0 and "Done: 8 steps." in said.out
    assert "A checkpoint could not be written" in said.out and "No space left on device" in said.out
    assert "The run goes on, and the older checkpoint stays." in said.out
    assert attempts[:2] == [[2, 4], [2, 4]], (
        "nothing old was given up for a new one that was not there yet"
    )
    assert 6 not in list_steps(run / "checkpoints") and list_steps(run / "checkpoints")[-1] == 8
    assert all(find_corruption(folder) is None for folder in (run / "checkpoints").iterdir())


def test_a_disk_that_stays_full_to_the_end(run, monkeypatch):
    before = files(run / "checkpoints")

    def to_fp32(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", to_fp32)
    letter = run_invalid(*TRAIN, "--steps", "8", "--checkpoint-every", "2", "--out", run)
    assert "Step 8 could not be saved" in letter and "Older checkpoints are untouched" in letter
    assert files(run / "checkpoints") == before


def test_a_disk_that_is_full_for_all_but_the_checkpoint(tmp_path, monkeypatch):
    """Numbers, samples and the model card are missed, and it is said; the run reaches its end and
    tells its numbers."""

    def to_fp32(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place in ("folder.append", "engine.engine.save_media", "start.write_card"):
        monkeypatch.setattr(f"tessera.{place}", to_fp32)
    said = tessera(*TRAIN, "--steps", "3", "--out", tmp_path / "run")
    assert said.code == 0, said
    assert said.out.count("metrics.jsonl cannot be written just now") == 1
    assert "The samples of step 3 could not be written" in said.out
    assert "README.md could not be written (No space left on device)" in said.out
    assert "Done: 3 steps. On 16 held-out examples: psnr" in said.text
    assert list_steps(tmp_path / "run" / "checkpoints") == [3]
    assert list((tmp_path / "run" / "samples").iterdir()) == []


def read_only(*_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_new_run_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", read_only)
    letter = run_invalid(*TRAIN, "--out", tmp_path / "run")
    assert (
        f"The run's folder {tmp_path / 'run'} cannot be written (Read-only file system)" in letter
        and "--out" in letter
    )


def test_an_old_run_in_a_folder_that_has_become_read_only(run, monkeypatch):
    before = files(run)
    really = os.open

    def no_writing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(run)):
            read_only()
        return really(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_writing)
    letter = run_invalid(*TRAIN, "--steps", "6", "--out", run)
    assert "cannot be written (Read-only file system)" in letter
    assert files(run) == before


def test_a_run_folder_that_is_a_file(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for out in (file, file / "run"):
        assert f"{file} is a file" in run_invalid(*TRAIN, "--out", out)
    assert file.read_text() == "mine"


# ----------------------------------------------------------------------------------------------------------- two at once

HOLD = """
import sys
from tessera.run.directory import RunFolder
RunFolder(sys.argv[1]).lock()
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_run_in(folder: Path) -> Iterator[int]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        yield holder.pid
    finally:
        holder.communicate(timeout=30)


def test_two_runs_on_one_folder_at_once(run):
    with another_run_in(run) as process:
        before = files(run)
        letter = run_invalid(*TRAIN, "--steps", "6", "--out", run)
        assert (
            f"Another run is at work in {run} (process {process})" in letter and "--out" in letter
        )
        assert files(run) == before
    assert tessera(*TRAIN, "--steps", "6", "--out", run).code == 0, "afterwards the folder is free"

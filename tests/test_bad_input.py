"""Tests of invalid input: every mistake gives a clear error and changes no file.

Each test runs a command and checks what its error message must contain, and that existing files are
unchanged. Messages are tested in detail beside the code that writes them.
"""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera.engine import checkpoint
from tessera.engine.checkpoint import describe_file, find_corruption, list_steps
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.run.directory import RunDirectory
from tests.cli_runner import read_files, run_invalid, tessera

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ("train", "images-vqgan", "--preset", "tiny")


def write_images(folder: Path, count: int, size: int = 24) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (size, size, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny run with checkpoints of steps 2 and 4; tests use copies of it."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    assert tessera(*TRAIN, "--steps", "4", "--checkpoint-every", "2", "--out", run).code == 0
    assert list_steps(run / "checkpoints") == [2, 4]
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


# ---- data


def test_missing_folder(tmp_path):
    message = run_invalid(*TRAIN, "--data", tmp_path / "nowhere", "--out", tmp_path / "run")
    assert f"{tmp_path / 'nowhere'} does not exist" in message
    assert "give a folder of images" in message
    assert not (tmp_path / "run").exists(), "no run directory is left behind"


def test_empty_folder(tmp_path):
    (tmp_path / "data").mkdir()
    message = run_invalid(*TRAIN, "--data", tmp_path / "data", "--out", tmp_path / "run")
    assert "has no images" in message and ".png" in message and "found no files at all" in message
    assert not (tmp_path / "run").exists()


def test_folder_of_other_files(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "song.mp3").write_bytes(b"la")
    message = run_invalid(*TRAIN, "--data", tmp_path / "data", "--out", tmp_path / "run")
    assert "found only 1 .mp3" in message
    assert read_files(tmp_path / "data") == {str(tmp_path / "data" / "song.mp3"): b"la"}


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_folder_of_unreadable_files(num_workers, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(20):
        (data / f"{number}.png").write_bytes(b"not an image")
    before = read_files(data)
    message = run_invalid(
        *TRAIN, "--data", data, "--num-workers", num_workers, "--out", tmp_path / "run"
    )
    assert "could not be read" in message and "not a PNG" in message
    assert "`tessera check` shows" in message
    assert read_files(data) == before and list_steps(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize("num_workers", ["0", "2"])
@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_unreadable_held_out_set_is_found_before_the_first_step(flags, num_workers, tmp_path):
    data = write_images(tmp_path / "data", 9)
    held_out = ImageDataConfig(path=str(data), val_fraction=0.05).build().validation
    assert len(held_out) == 1
    (data / held_out.name(0)).write_bytes(b"not an image")
    command = (*TRAIN, "--data", data, "--data.val-fraction", "0.05", "--batch-size", "4", *flags)
    message = run_invalid(*command, "--num-workers", num_workers, "--out", tmp_path / "run")
    assert "The 1 held-out example(s) could not be read" in message
    assert held_out.name(0) in message and "not a PNG" in message
    assert "`tessera check` shows" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_one_unreadable_file_is_reported_once(num_workers, tmp_path):
    """The run completes, also if it is resumed and loads the file several times."""
    data = write_images(tmp_path / "data", 99)
    whole = (data / "007.png").read_bytes()
    (data / "broken.png").write_bytes(whole[: len(whole) // 2])
    flags = ("--num-workers", num_workers, "--batch-size", "16", "--validate-every", "4")
    command = (*TRAIN, "--data", data, *flags, "--out", tmp_path / "run")
    results = [tessera(*command, "--steps", steps) for steps in ("6", "10")]
    assert [result.code for result in results] == [0, 0]
    assert [result.out.count("Skipped broken.png") for result in results] == [1, 0]
    (line,) = RunDirectory(tmp_path / "run").read_notes("rejected.jsonl")
    assert line["example"] == "broken.png" and line["reason"]
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == 10


def test_tokenizer_run_opens_no_caption_file(tmp_path, monkeypatch):
    data = write_images(tmp_path / "data", 12)
    for number in range(12):
        (data / f"{number:03d}.txt").write_bytes(b"\xff\xfe\x00")  # not UTF-8
    (data / "metadata.jsonl").write_text("not JSON")
    (data / "metadata.csv").write_text("not,CSV\n1\n")
    opened: list[Path] = []

    def record_calls(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path | str | int, *args: Any, **kwargs: Any) -> Any:
            opened.append(Path(str(path)))
            return method(path, *args, **kwargs)

        return call

    for name in ("open", "read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, record_calls(getattr(Path, name)))
    monkeypatch.setattr(builtins, "open", record_calls(open))
    command = (*TRAIN, "--data", data, "--steps", "2", "--out", tmp_path / "run")
    result = tessera(*command)
    assert result.code == 0, result
    assert "Skipped" not in result.text
    assert RunDirectory(tmp_path / "run").read_notes("rejected.jsonl") == []
    for command in (
        ("sample", tmp_path / "run", "--count", "2", "--out", tmp_path / "samples"),
        ("evaluate", tmp_path / "run"),
        ("tokenize", tmp_path / "run", "--data", data, "--out", tmp_path / "codes"),
    ):
        result = tessera(*command)
        assert result.code == 0 and "Skipped" not in result.text, result
    in_data = {path.name for path in opened if path.parent == data}
    assert in_data == {f"{number:03d}.png" for number in range(12)}


def test_small_images_are_enlarged_or_skipped(tmp_path):
    data = write_images(tmp_path / "data", 12, size=8)
    before = read_files(data)
    assert tessera(*TRAIN, "--data", data, "--steps", "1", "--out", tmp_path / "run").code == 0
    message = run_invalid(
        *TRAIN, "--data", data, "--data.on-small", "skip", "--out", tmp_path / "other"
    )
    assert "the image is 8 x 8, smaller than the requested 16" in message
    assert read_files(data) == before


def test_fewer_images_than_a_batch(tmp_path):
    data = write_images(tmp_path / "data", 6)
    message = run_invalid(
        *TRAIN, "--data", data, "--data.val-fraction", "0", "--out", tmp_path / "run"
    )
    expected = (
        "The batch size is 8, but the training set has 6 examples. Use --batch-size 6 or less"
    )
    assert expected in message
    assert not (tmp_path / "run").exists()


# ---- settings


def test_unknown_recipe():
    expected = "There is no recipe 'image-vqgan': did you mean 'images-vqgan'?"
    assert expected in run_invalid("train", "image-vqgan")


def test_unknown_flag(tmp_path):
    message = run_invalid(*TRAIN, "--batch-sise", "4", "--out", tmp_path / "run")
    assert "--batch-sise" in message and "Perhaps you meant: --batch-size" in message
    assert not (tmp_path / "run").exists()


def test_size_that_is_not_a_multiple_of_the_stride(tmp_path):
    message = run_invalid(*TRAIN, "--data.size", "30", "--out", tmp_path / "run")
    assert "The image size is 30" in message and "multiple of 4: use 28 or 32" in message
    assert not (tmp_path / "run").exists()


CODEBOOK_SIZE = "--task.model.quantizer.codebook-size"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--quantizer", "lfq", CODEBOOK_SIZE, "1000"], "must be a power of two: use 512 or 1024"),
        (["--quantizer", "bsq", CODEBOOK_SIZE, "1"], "must be a power of two"),
        (["--quantizer", "vq", CODEBOOK_SIZE, "1"], "codes, 2 or more"),
        (["--quantizer", "simvq", CODEBOOK_SIZE, "1"], "codes, 2 or more"),
        (["--task.model.quantizer.levels", "8", "1"], "two or more"),
    ],
)
def test_invalid_codebook(flags, expected, tmp_path):
    assert expected in run_invalid(*TRAIN, *flags, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_batch_that_cannot_be_divided_among_processes(tmp_path):
    """The error is raised before any process is started."""
    message = run_invalid(*TRAIN, "--nproc", "3", "--out", tmp_path / "run")
    assert "A batch of 8 examples" in message and "3 process(es): use --batch-size 9" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["features.0.weight"], "features.0.bias (64,) is expected and missing"),
        (["conv1.weight"], "features.0.weight (64, 3, 3, 3) is expected and missing"),
    ],
)
def test_vgg_file_with_other_names(names, expected, tmp_path):
    file = tmp_path / "vgg16.safetensors"
    save_file({name: torch.zeros(2, 2) for name in names}, file)
    message = run_invalid(*TRAIN, "--perceptual", file, "--out", tmp_path / "run")
    assert f"{file} does not contain the weights of this network" in message
    assert expected in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"no tensors at all"])
def test_file_that_has_no_vgg_weights(content, tmp_path):
    file = tmp_path / "vgg16.pth"
    file.write_bytes(content)
    message = run_invalid(*TRAIN, "--perceptual", file, "--out", tmp_path / "run")
    assert "could not be read as a file of tensors" in message
    missing = tmp_path / "none.pth"
    message = run_invalid(*TRAIN, "--perceptual", missing, "--out", tmp_path / "run")
    assert "does not exist" in message
    assert file.read_bytes() == content and not (tmp_path / "run").exists()


# ---- checkpoints


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip_bit(folder: Path) -> None:
    file = folder / "ema.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)


CORRUPTIONS = pytest.mark.parametrize(
    ("corrupt", "problem"), [(truncate, "bytes instead of"), (flip_bit, "checksum")]
)


@CORRUPTIONS
def test_corrupt_checkpoint_is_passed_over_for_an_older_one(corrupt, problem, run):
    corrupt(run / "checkpoints" / "000004")
    older = read_files(run / "checkpoints" / "000002")
    result = tessera(*TRAIN, "--steps", "6", "--out", run)
    assert result.code == 0 and problem in result.out
    assert "Checkpoint 000004 is corrupt" in result.out
    assert "Resuming from step 2." in result.out
    assert find_corruption(run / "checkpoints" / "000006") is None
    left = read_files(run / "checkpoints" / "000002")
    assert left in ({}, older), "pruned in its turn or unchanged"
    records = RunDirectory(run).read_records("train")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]


@CORRUPTIONS
def test_run_with_corrupt_checkpoints_only_is_rejected_and_unchanged(corrupt, problem, run):
    for folder in (run / "checkpoints").iterdir():
        corrupt(folder)
    before = read_files(run / "checkpoints", run / "samples")
    message = run_invalid(*TRAIN, "--steps", "6", "--out", run)
    assert "None of the 2 checkpoints" in message and "Nothing was changed" in message
    assert "--fresh" in message
    assert read_files(run / "checkpoints", run / "samples") == before
    assert len(RunDirectory(run).read_records("train")) == 4
    for command in ("sample", "evaluate"):
        assert "None of the 2 checkpoints" in run_invalid(command, run)


@CORRUPTIONS
def test_other_commands_report_a_corrupt_checkpoint_too(corrupt, problem, run, tmp_path):
    corrupt(run / "checkpoints" / "000004")
    result = tessera("sample", run, "--count", "2", "--out", tmp_path / "samples")
    assert result.code == 0
    assert "000004 is corrupt" in result.err and "step 2" in result.out


def update_manifest(folder: Path) -> None:
    """Make the manifest of a checkpoint fit its modified files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: describe_file(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_checkpoint_of_another_model(run):
    for folder in (run / "checkpoints").iterdir():
        for name in ("model", "ema"):
            tensors = load_file(folder / f"{name}.safetensors")
            tensors["encoder.0.weight"] = torch.zeros(7, 3, 5, 5)
            tensors["encoder.unexpected"] = torch.zeros(1)
            del tensors["encoder.0.bias"]
            save_file(tensors, folder / f"{name}.safetensors")
        update_manifest(folder)
    before = read_files(run / "checkpoints", run / "samples")
    shapes = "has shape (7, 3, 5, 5) in the file and (16, 3, 5, 5) in the network"
    for command in ((*TRAIN, "--steps", "6", "--out", run), ("sample", run), ("evaluate", run)):
        message = run_invalid(*command)
        assert "does not fit this network" in message
        assert "encoder.0.bias is missing from the file" in message
        assert "encoder.unexpected is in the file but not in the network" in message
        assert f"encoder.0.weight {shapes}" in message
    assert read_files(run / "checkpoints", run / "samples") == before
    assert len(RunDirectory(run).read_records("train")) == 4


# ---- the disk


def raise_disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_failed_checkpoint_keeps_the_old_one_and_training_continues(run, monkeypatch):
    save, attempts = checkpoint.save_file, []

    def fail_once(*args: Any, **kwargs: Any) -> None:
        attempts.append(list_steps(run / "checkpoints"))
        if len(attempts) == 1:
            raise_disk_full()
        save(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", fail_once)
    result = tessera(*TRAIN, "--steps", "8", "--checkpoint-every", "2", "--out", run)
    assert result.code == 0 and "Done: 8 steps." in result.out
    assert "A checkpoint could not be written" in result.text
    assert "No space left on device" in result.text
    assert "Training continues, and the older checkpoint stays." in result.text
    assert attempts[:2] == [[2, 4], [2, 4]], "none is removed before the new one is complete"
    assert 6 not in list_steps(run / "checkpoints") and list_steps(run / "checkpoints")[-1] == 8
    assert all(find_corruption(folder) is None for folder in (run / "checkpoints").iterdir())


def test_disk_that_stays_full_ends_in_an_error(run, monkeypatch):
    before = read_files(run / "checkpoints")
    monkeypatch.setattr(checkpoint, "save_file", raise_disk_full)
    message = run_invalid(*TRAIN, "--steps", "8", "--checkpoint-every", "2", "--out", run)
    assert "Step 8 could not be saved" in message and "Older checkpoints are unchanged" in message
    assert read_files(run / "checkpoints") == before


def test_run_completes_without_metrics_samples_and_model_card(tmp_path, monkeypatch):
    """With a disk that is full for everything but checkpoints, the final metrics are printed."""
    for function in (
        "run.directory.append_text",
        "engine.engine.save_samples",
        "run.train.write_model_card",
    ):
        monkeypatch.setattr(f"tessera.{function}", raise_disk_full)
    result = tessera(*TRAIN, "--steps", "3", "--out", tmp_path / "run")
    assert result.code == 0, result
    assert result.text.count("metrics.jsonl cannot be written") == 1
    assert "The samples of step 3 could not be written" in result.text
    assert "README.md could not be written (No space left on device)" in result.text
    assert "Done: 3 steps. On 16 held-out examples: psnr" in result.text
    assert list_steps(tmp_path / "run" / "checkpoints") == [3]
    assert list((tmp_path / "run" / "samples").iterdir()) == []


def raise_read_only(*_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_new_run_in_a_read_only_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", raise_read_only)
    message = run_invalid(*TRAIN, "--out", tmp_path / "run")
    assert f"The run directory {tmp_path / 'run'} cannot be written" in message
    assert "(Read-only file system)" in message and "--out" in message


def test_existing_run_that_has_become_read_only(run, monkeypatch):
    before = read_files(run)
    open_file = os.open

    def open_read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(run)):
            raise_read_only()
        return open_file(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_read_only)
    message = run_invalid(*TRAIN, "--steps", "6", "--out", run)
    assert "cannot be written (Read-only file system)" in message
    assert read_files(run) == before


def test_run_directory_that_is_a_file(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for out in (file, file / "run"):
        assert f"{file} is a file" in run_invalid(*TRAIN, "--out", out)
    assert file.read_text() == "mine"


# ---- two runs at the same time

LOCK = """
import sys
from tessera.run.directory import RunDirectory
RunDirectory(sys.argv[1]).lock()
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked_by_another_process(folder: Path) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOCK, str(folder)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process.pid
    finally:
        process.communicate(timeout=600)


def test_directory_of_another_running_process(run):
    with locked_by_another_process(run) as process:
        before = read_files(run)
        message = run_invalid(*TRAIN, "--steps", "6", "--out", run)
        assert f"Another run uses {run} (process {process})" in message and "--out" in message
        assert read_files(run) == before
    assert tessera(*TRAIN, "--steps", "6", "--out", run).code == 0, "it is free afterwards"

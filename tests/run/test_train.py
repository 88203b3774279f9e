"""Nothing is written into a run directory before it is locked and its settings are compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.run.train import find_unused_folder
from tests.cli_runner import run_invalid, tessera
from tests.run.test_directory import locked_by_another_process
from tests.runs import tokenizer
from tests.text.test_pretrained import MODELS, save_model

TRAIN = (
    *("train", "images-maskgit", "--preset", "tiny"),
    *("--batch-size", "4", "--sample-count", "1"),
)


def write_images(folder: Path, caption: str) -> Path:
    folder.mkdir()
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).resize((16, 16)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"{caption} {number}")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images and with a run that has cached their codes and captions.

    The text encoder is a pretrained one, because only those cache the states of captions.
    """
    folder = tmp_path_factory.mktemp("trained")
    save_model(folder / "text", MODELS["t5"]())
    images = write_images(folder / "images", "an image, number")
    write_images(folder / "others", "an entirely different caption of")
    flags = ("--tokenizer", tokenizer(), "--text", folder / "text", "--steps", "2")
    result = tessera(*TRAIN, *flags, "--data", images, "--out", folder / "run")
    assert result.code == 0, result
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, last locked by another process."""
    shutil.copytree(trained / "run", tmp_path / "run")
    (tmp_path / "run" / "lock").write_text("1")
    return tmp_path / "run"


def list_files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and modification time of every file and folder but the lock."""
    return {
        path.relative_to(folder).as_posix(): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.name != "lock"
    }


def test_run_has_a_cache_that_could_be_overwritten(run):
    names = {path.name.split("-")[0] for path in (run / "cache").iterdir()}
    assert names == {"tokenizer", "texts"} and (run / "dependencies" / "tokenizer").is_dir()


@pytest.mark.parametrize(
    ("data", "flags", "difference"),
    [
        ("others", (), "data.path"),
        ("images", ("--seed", "1"), "engine.seed: 0 in the folder, 1 requested"),
        ("images", ("--task.model.dim", "64"), "task.model.dim"),
        ("images", ("--critic", "own"), "task.critic"),
    ],
    ids=str,
)
def test_run_with_other_settings_leaves_every_file_unchanged(data, flags, difference, run, trained):
    """Also the caches of codes and captions, which other data and models would replace."""
    before = list_files(run)
    settings = ("--tokenizer", tokenizer(), "--text", trained / "text", "--steps", "3", *flags)
    message = run_invalid(*TRAIN, *settings, "--data", trained / data, "--out", run)
    assert "holds a run with other settings" in message and difference in message
    assert "Nothing was changed." in message
    assert list_files(run) == before


def test_directory_locked_by_another_process_is_left_unchanged(run, trained):
    flags = ("--tokenizer", tokenizer(), "--text", trained / "text", "--steps", "3")
    with locked_by_another_process(run) as holder:
        before, lock = list_files(run), (run / "lock").read_text()
        message = run_invalid(*TRAIN, *flags, "--data", trained / "others", "--out", run)
        assert f"(process {holder.pid})" in message
        assert list_files(run) == before and (run / "lock").read_text() == lock


def test_new_directory_is_not_created_for_an_invalid_run(trained, tmp_path):
    flags = ("--tokenizer", tokenizer(), "--data", trained / "images")
    message = run_invalid(*TRAIN, *flags, "--batch-size", "64", "--out", tmp_path / "run")
    assert "64" in message and not (tmp_path / "run").exists()


# ---- folders


def test_fresh_run_uses_the_first_free_folder(tmp_path):
    folder = tmp_path / "run"
    assert find_unused_folder(folder) == folder
    folder.mkdir()
    assert find_unused_folder(folder) == folder, "it holds no run"
    (folder / "config.json").write_text("{}")
    assert find_unused_folder(folder) == tmp_path / "run-2"
    (tmp_path / "run-2").mkdir()
    assert find_unused_folder(folder) == tmp_path / "run-3"

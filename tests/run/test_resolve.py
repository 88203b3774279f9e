"""Settings of the data that a command leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tests.cli_runner import run_invalid, tessera

TRAIN = ("train", "images-vqgan", "--preset", "tiny", "--steps", "2")
TRAIN_GENERATOR = ("train", "images-maskgit", "--preset", "tiny", "--steps", "2")


def write_images(folder: Path, side: int) -> Path:
    """Write grey images in two classes."""
    for number in range(16):
        pixels = np.random.default_rng(number).integers(0, 256, (side, side), np.uint8)
        path = folder / ("one" if number % 2 else "two") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), 20)


@pytest.fixture(scope="module")
def tokenizer(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "vqgan"
    result = tessera(*TRAIN, "--data", images, "--out", out)
    assert (
        "16 images with a median short side of 20 pixels, all grey: --data.size 20" in result.text
    )
    return out


def read_data(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())["data"]


def test_settings_of_the_data_are_chosen_and_stored(tokenizer):
    data = read_data(tokenizer)
    assert (data["size"], data["channels"]) == (20, 1)


def test_settings_that_are_given_are_used(images, tmp_path):
    given = ("--data.size=16", "--data.channels", "3")
    result = tessera(*TRAIN, "--data", images, *given, "--out", tmp_path / "run")
    assert result.code == 0 and "median" not in result.text
    data = read_data(tmp_path / "run")
    assert (data["size"], data["channels"]) == (16, 3)


def test_synthetic_data_have_the_size_of_the_preset(tmp_path):
    tessera(*TRAIN, "--out", tmp_path / "run")
    data = read_data(tmp_path / "run")
    assert (data["size"], data["channels"]) == (16, 3)


def test_resumed_run_keeps_its_settings_when_the_folder_changed(tmp_path):
    images = write_images(tmp_path / "images", 20)
    out = ("--data", images, "--out", tmp_path / "run")
    tessera(*TRAIN, *out)
    PIL.Image.new("RGB", (16, 16), "red").save(images / "red.png")
    result = tessera(*TRAIN, *out, "--steps", "3")
    assert result.code == 0 and "median" not in result.text
    assert (read_data(tmp_path / "run")["size"], read_data(tmp_path / "run")["channels"]) == (20, 1)
    message = run_invalid(*TRAIN, *out, "--steps", "4", "--data.size", "16")
    assert "data.size: 20 in the folder, 16 requested" in message


def test_generator_takes_the_settings_of_its_tokenizer(images, tokenizer, tmp_path):
    flags = ("--data", images, "--tokenizer", tokenizer, "--out", tmp_path / "run")
    result = tessera(*TRAIN_GENERATOR, *flags)
    assert (
        "As the tokenizer was trained: --data.size 20 --data.channels 1 --data.aspect 1.0."
        in result.text
    )
    data = read_data(tmp_path / "run")
    assert (data["size"], data["channels"]) == (20, 1)
    assert tessera(*TRAIN_GENERATOR, *flags, "--steps", "3").code == 0


def test_generator_with_other_settings_than_its_tokenizer_is_rejected(images, tokenizer, tmp_path):
    flags = ("--data", images, "--tokenizer", tokenizer, "--out", tmp_path / "run")
    message = run_invalid(*TRAIN_GENERATOR, *flags, "--data.channels", "3")
    assert "examples with channels 1, but this run has channels 3: use --data.channels 1" in message


def test_dry_run_uses_the_settings_of_the_folder(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = tessera(*TRAIN, "--data", images, "--dry-run")
    assert result.code == 0 and not list(tmp_path.iterdir())

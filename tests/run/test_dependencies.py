"""Runs that a run depends on: copied once into its directory, rejected if they do not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Literal

import pytest

from tessera.api.generator import Generator
from tessera.api.tokenizer import Tokenizer
from tessera.engine.checkpoint import list_steps
from tessera.modalities.audio.recipes import audio_codec
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres, images_vqgan
from tessera.run.config import Run, encode
from tessera.run.dependencies import check_preprocessing
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.train import claim_directory
from tests.cli_runner import read_files, run_invalid, tessera
from tests.runs import build_tiny, engine_in, read_metrics, tokenizer, train

TRAIN = ("train", "images-maskgit", "--preset", "tiny")


def shorten(run: Run, steps: int = 2) -> Run:
    engine = dataclasses.replace(run.engine, steps=steps, sample_count=2)
    return dataclasses.replace(run, engine=engine)


def train_tokenizer(
    folder: Path, steps: int = 2, size: int = 16, adversary: Literal["on", "off"] = "off"
) -> Path:
    run = shorten(images_vqgan("tiny", adversary=adversary), steps)
    train(folder, dataclasses.replace(run, data=dataclasses.replace(run.data, size=size)))
    return folder


@pytest.fixture
def own_tokenizer(tmp_path: Path) -> Path:
    """Return a copy of the tokenizer that a test may change."""
    shutil.copytree(tokenizer(), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def run(own_tokenizer: Path, tmp_path: Path) -> Path:
    train(tmp_path / "run", shorten(images_maskgit("tiny", tokenizer=str(own_tokenizer))))
    return tmp_path / "run"


def generate(run: Path) -> list[bytes]:
    images = Generator.load(run).generate(["a red circle"] * 2).media
    return [image.pixels.tobytes() for image in images]


# ---- copies


def test_run_directory_can_be_used_alone(run, own_tokenizer, tmp_path):
    before = generate(run)
    shutil.rmtree(own_tokenizer)
    moved = run.rename(tmp_path / "moved")
    assert generate(moved) == before
    assert tessera("sample", moved, "--prompt", "a red circle", "--count", "1").code == 0
    assert tessera("evaluate", moved, "--samples", "0").code == 0


def test_run_resumes_without_the_original_tokenizer(run, own_tokenizer):
    shutil.rmtree(own_tokenizer)
    train(run, shorten(images_maskgit("tiny", tokenizer=str(own_tokenizer)), steps=4))
    steps = [record["step"] for record in read_metrics(run) if record["kind"] == "train"]
    assert steps == [1, 2, 3, 4]


def test_copy_has_the_same_tokenizer_without_its_discriminator(tmp_path):
    original = train_tokenizer(tmp_path / "original", adversary="on")
    engine = engine_in(tmp_path / "run", shorten(images_maskgit("tiny", tokenizer=str(original))))
    engine.directory.unlock()
    copy = tmp_path / "run" / "dependencies" / "tokenizer"
    assert Tokenizer.load(copy).fingerprint == Tokenizer.load(original).fingerprint
    assert json.loads((original / "config.json").read_text())["task"]["adversary"] is not None
    assert json.loads((copy / "config.json").read_text())["task"]["adversary"] is None
    (weights,) = copy.rglob("*.safetensors")
    assert weights.name == "ema.safetensors" and list_steps(copy / "checkpoints") == [2]


def test_copy_needs_no_network_of_losses_or_metrics(tmp_path):
    folder = train_tokenizer(tmp_path / "original")
    config = json.loads((folder / "config.json").read_text())
    perceptual = {"weight": 1.0, "vgg": None}
    config["task"]["reconstruction"] |= {"measure_features": True, "perceptual": perceptual}
    (folder / "config.json").write_text(json.dumps(config))
    engine = engine_in(tmp_path / "run", shorten(images_maskgit("tiny", tokenizer=str(folder))))
    engine.directory.unlock()
    copied = json.loads((tmp_path / "run/dependencies/tokenizer/config.json").read_text())
    reconstruction = copied["task"]["reconstruction"]
    assert reconstruction["perceptual"] is None and reconstruction["measure_features"] is False


def test_tokenizer_trained_further_is_rejected_and_the_copy_accepted(run, own_tokenizer):
    shutil.rmtree(own_tokenizer)
    train_tokenizer(own_tokenizer, steps=3)
    before = read_files(run / "dependencies", run / "checkpoints")
    command = (*TRAIN, "--sample-count", "2", "--steps", "3", "--out", run)
    message = run_invalid(*command, "--tokenizer", own_tokenizer)
    copy = run / "dependencies" / "tokenizer"
    assert "is another one or was trained further" in message
    assert f"--tokenizer {copy}" in message
    assert read_files(run / "dependencies", run / "checkpoints") == before
    result = tessera(*command, "--tokenizer", copy)
    assert result.code == 0, result


def test_unfinished_tokenizer_is_used_with_a_warning(own_tokenizer, tmp_path):
    config = json.loads((own_tokenizer / "config.json").read_text())
    trained_for = config["engine"]["steps"]
    config["engine"]["steps"] = 10 * trained_for
    (own_tokenizer / "config.json").write_text(json.dumps(config))
    warning = f"was trained for {trained_for:,} of {10 * trained_for:,} steps"
    short = ("--steps", "2", "--sample-count", "1")
    flags = ("--tokenizer", own_tokenizer, "--out", tmp_path / "run")
    assert warning in tessera(*TRAIN, *short, *flags).text
    sample = ("--count", "1", "--out", tmp_path / "samples")
    generated = tessera("sample", tmp_path / "run", "--prompt", "a ring", *sample).text
    assert warning in generated and "can resume it" not in generated
    original = tessera("sample", own_tokenizer, *sample).text
    assert warning in original and "can resume it" in original


def test_interrupted_copy_is_repeated(tmp_path):
    run = shorten(build_tiny(images_maskgit), 1)
    directory = RunDirectory(tmp_path / "run")
    claim_directory(directory, encode(run))
    directory.unlock()
    partial = directory.dependencies / ".tokenizer.writing"
    partial.mkdir(parents=True)
    (partial / "config.json").write_text("{")
    train(tmp_path / "run", run)
    copies = [path.name for path in (tmp_path / "run" / "dependencies").iterdir()]
    assert copies == ["tokenizer"]


def test_corrupt_copy_is_an_error(run):
    (weights,) = (run / "dependencies").rglob("ema.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError):
        Generator.load(run)


# ---- runs that are not suitable


def test_run_without_a_checkpoint_is_rejected_as_tokenizer(tmp_path):
    folder = tmp_path / "untrained"
    shutil.copytree(tokenizer(), folder)
    shutil.rmtree(folder / "checkpoints")
    message = run_invalid(*TRAIN, "--tokenizer", folder, "--out", tmp_path / "run")
    assert "has no checkpoint: train it first" in message and str(folder) in message


def test_missing_tokenizer_leaves_the_output_folder_usable(tmp_path):
    command = (*TRAIN, "--steps", "1", "--sample-count", "1", "--out", tmp_path / "run")
    message = run_invalid(*command, "--tokenizer", tmp_path / "nowhere")
    assert f"There is no tokenizer in {tmp_path / 'nowhere'}" in message
    assert "tessera train images-vqgan" in message and "--tokenizer RUN" in message
    result = tessera(*command, "--tokenizer", tokenizer())
    assert result.code == 0, result


def test_generator_is_rejected_as_tokenizer(run, tmp_path):
    message = run_invalid(*TRAIN, "--tokenizer", run, "--out", tmp_path / "other")
    assert "'images-maskgit', which trains no tokenizer" in message


def test_images_of_another_size_are_rejected_with_the_right_flag(tmp_path):
    flags = ("--tokenizer", tokenizer(), "--data.size", "32", "--out", tmp_path / "run")
    message = run_invalid(*TRAIN, *flags)
    expected = "was trained on examples with size 16, but this run has size 32: use --data.size 16,"
    assert expected in message
    reason = message.partition(expected)[2]
    assert "--tokenizer RUN" in reason and "channels" not in reason and "{" not in reason


def test_every_setting_that_differs_from_the_tokenizer_is_named():
    run = images_maskgit("tiny", tokenizer=str(tokenizer()))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, channels=1, aspect=2.0))
    with pytest.raises(UserError) as raised:
        check_preprocessing(run, Tokenizer.load(tokenizer()), "tokenizer")
    message = str(raised.value)
    assert "with channels 3 and aspect 1.0, but this run has channels 1 and aspect 2.0" in message
    assert "use --data.channels 3 --data.aspect 1.0, or another tokenizer" in message


def test_tokenizer_of_another_medium_is_rejected_by_its_name(tmp_path):
    codec = tmp_path / "codec"
    train(codec, shorten(audio_codec("tiny"), 1))
    message = run_invalid(*TRAIN, "--tokenizer", codec, "--out", tmp_path / "run")
    assert "was trained on audio files, but this run is trained on images" in message
    assert "give a tokenizer of images (--tokenizer RUN)" in message


# ---- super-resolution

SUPERRES = (
    *("train", "images-maskgit-superres", "--preset", "tiny"),
    *("--steps", "1", "--sample-count", "1"),
)


def test_low_resolution_tokenizer_of_larger_images_is_rejected(tmp_path):
    tokenizers = ("--tokenizer", tokenizer(16), "--low-res-tokenizer", tokenizer(32))
    flags = ("--data.size", "16", "--out", tmp_path / "run")
    message = run_invalid(*SUPERRES, *tokenizers, *flags)
    assert "Images of 16 pixels cannot be reduced to 32 by a whole factor" in message
    assert "--low-res-tokenizer" in message


def test_low_resolution_that_does_not_divide_the_high_one_is_rejected(tmp_path):
    odd = train_tokenizer(tmp_path / "odd", size=24)
    tokenizers = ("--tokenizer", tokenizer(32), "--low-res-tokenizer", odd)
    message = run_invalid(*SUPERRES, *tokenizers, "--out", tmp_path / "run")
    assert "(6, 6)" in message and "(8, 8)" in message


def test_missing_low_resolution_tokenizer_is_rejected_with_its_flag(tmp_path):
    tokenizers = ("--tokenizer", tokenizer(32), "--low-res-tokenizer", tmp_path / "nowhere")
    message = run_invalid(*SUPERRES, *tokenizers, "--out", tmp_path / "run")
    assert str(tmp_path / "nowhere") in message and "--low-res-tokenizer RUN" in message


def test_both_tokenizers_are_copied(tmp_path):
    engine = engine_in(tmp_path, shorten(build_tiny(images_maskgit_superres), 1))
    engine.directory.unlock()
    copies = sorted(path.name for path in RunDirectory(tmp_path).dependencies.iterdir())
    assert copies == ["low_res_tokenizer", "tokenizer"]
    grids = {name: one.grid for name, one in engine.task.tokenizers.items()}
    assert grids == {"tokenizer": (8, 8), "low_res_tokenizer": (4, 4)}

"""What a run stands on lies in its own folder: copied once, the same ever after, and refused where
it does not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from tessera.api.generator import Generator
from tessera.engine.checkpoint import list_steps
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres, images_vqgan
from tessera.run.config import Run
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.load import Tokenizer, load_run
from tests.cli_runner import files, run_invalid, tessera
from tests.runs import engine_in, build_tiny, read_metrics, tokenizer, train


def brief(run: Run, steps: int = 2) -> Run:
    return dataclasses.replace(
        run, engine=dataclasses.replace(run.engine, steps=steps, sample_count=2)
    )


def another_tokenizer(place: Path, steps: int = 2, size: int = 16, adversary: str = "off") -> Path:
    run = brief(images_vqgan("tiny", adversary=adversary), steps)
    train(place, dataclasses.replace(run, data=dataclasses.replace(run.data, size=size)))
    return place


@pytest.fixture
def own_tokenizer(tmp_path: Path) -> Path:
    shutil.copytree(tokenizer(), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def run(own_tokenizer: Path, tmp_path: Path) -> Path:
    """A run of two steps on a tokenizer that a test may harm."""
    train(tmp_path / "run", brief(images_maskgit("tiny", tokenizer=str(own_tokenizer))))
    return tmp_path / "run"


def test_a_runs_folder_is_all_that_it_needs(run, own_tokenizer, tmp_path):
    before = [
        picture.pixels.tobytes() for picture in Generator.load(run).generate(["a red circle"] * 2)
    ]
    shutil.rmtree(own_tokenizer)
    moved = run.rename(tmp_path / "moved")
    assert [
        picture.pixels.tobytes() for picture in Generator.load(moved).generate(["a red circle"] * 2)
    ] == before
    assert tessera("sample", moved, "--prompt", "a red circle", "--count", "1").code == 0
    assert tessera("evaluate", moved, "--samples", "0").code == 0


def test_a_run_goes_on_without_its_tokenizers_folder(run, own_tokenizer):
    shutil.rmtree(own_tokenizer)
    train(run, brief(images_maskgit("tiny", tokenizer=str(own_tokenizer)), steps=4))
    assert [record["step"] for record in read_metrics(run) if record["kind"] == "train"] == [
        1,
        2,
        3,
        4,
    ]


def test_the_copy_is_the_tokenizer_without_what_only_its_training_needs(tmp_path):
    judged = another_tokenizer(tmp_path / "judged", adversary="on")
    engine_in(
        tmp_path / "run", brief(images_maskgit("tiny", tokenizer=str(judged)))
    ).folder.unlock()
    copy = tmp_path / "run" / "parts" / "tokenizer"
    assert Tokenizer(load_run(copy)).fingerprint == Tokenizer(load_run(judged)).fingerprint
    assert json.loads((judged / "config.json").read_text())["task"]["adversary"] is not None
    assert json.loads((copy / "config.json").read_text())["task"]["adversary"] is None
    (weights,) = copy.rglob("*.safetensors")
    assert weights.name == "ema.safetensors" and list_steps(copy / "checkpoints") == [2]


def test_networks_that_only_measure_are_not_needed_by_the_copy(tmp_path):
    place = another_tokenizer(tmp_path / "measured")
    config = json.loads((place / "config.json").read_text())
    config["task"]["fidelity"] |= {
        "measure_features": True,
        "perceptual": {"weight": 1.0, "vgg": None},
    }
    (place / "config.json").write_text(json.dumps(config))
    engine_in(tmp_path / "run", brief(images_maskgit("tiny", tokenizer=str(place)))).folder.unlock()
    reconstruction = json.loads(
        (tmp_path / "run" / "parts" / "tokenizer" / "config.json").read_text()
    )["task"]["fidelity"]
    assert reconstruction["perceptual"] is None and reconstruction["measure_features"] is False


def test_a_tokenizer_that_was_trained_on_since_is_refused_and_the_copy_can_be_gone_on_with(
    run, own_tokenizer
):
    shutil.rmtree(own_tokenizer)
    another_tokenizer(own_tokenizer, steps=3)
    before = files(run / "parts", run / "checkpoints")
    command = ("train", "images-maskgit", "--preset", "tiny", "--sample-count", "2", "--out", run)
    letter = run_invalid(*command, "--steps", "3", "--tokenizer", own_tokenizer)
    copy = run / "parts" / "tokenizer"
    assert "is another one, or was trained on since" in letter and f"--tokenizer {copy}" in letter
    assert files(run / "parts", run / "checkpoints") == before
    said = tessera(*command, "--steps", "3", "--tokenizer", copy)
    assert said.code == 0, said


def test_a_run_without_a_checkpoint_is_no_tokenizer_yet(tmp_path):
    place = tmp_path / "untrained"
    shutil.copytree(tokenizer(), place)
    shutil.rmtree(place / "checkpoints")
    letter = run_invalid(
        "train",
        "images-maskgit",
        "--preset",
        "tiny",
        "--tokenizer",
        place,
        "--out",
        tmp_path / "run",
    )
    assert "was never trained" in letter and str(place) in letter


def test_where_there_is_no_tokenizer_the_letter_says_how_to_get_one_and_the_same_folder_serves_afterwards(
    tmp_path,
):
    out = tmp_path / "run"
    command = (
        "train",
        "images-maskgit",
        "--preset",
        "tiny",
        "--steps",
        "1",
        "--sample-count",
        "1",
        "--out",
        out,
    )
    letter = run_invalid(*command, "--tokenizer", tmp_path / "nowhere")
    assert (
        f"There is no tokenizer in {tmp_path / 'nowhere'}" in letter
        and "tessera train images-vqgan" in letter
    )
    said = tessera(*command, "--tokenizer", tokenizer())
    assert said.code == 0, said


def test_a_generator_is_no_tokenizer(run, tmp_path):
    letter = run_invalid(
        "train",
        "images-maskgit",
        "--preset",
        "tiny",
        "--tokenizer",
        run,
        "--out",
        tmp_path / "other",
    )
    assert "makes no tokenizer" in letter


def test_pictures_of_another_size_than_the_tokenizer_knows_are_refused_with_the_flag(tmp_path):
    command = (
        "train",
        "images-maskgit",
        "--preset",
        "tiny",
        "--tokenizer",
        tokenizer(),
        "--out",
        tmp_path / "run",
    )
    letter = run_invalid(*command, "--data.size", "32")
    assert "{'size': 16}" in letter and "{'size': 32}" in letter and "--data.size 16" in letter


def test_a_copy_that_was_interrupted_is_made_again(tmp_path):
    half = tmp_path / "run" / "parts" / ".tokenizer.writing"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{")
    run = brief(build_tiny(images_maskgit), 1)
    train(tmp_path / "run", run)
    assert [path.name for path in (tmp_path / "run" / "parts").iterdir()] == ["tokenizer"]


def test_a_damaged_copy_is_told(run):
    (weights,) = (run / "parts").rglob("ema.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError):
        Generator.load(run)


# ---------------------------------------------------------------------------------------------------- super-resolution


SUPERRES = (
    "train",
    "images-maskgit-superres",
    "--preset",
    "tiny",
    "--steps",
    "1",
    "--sample-count",
    "1",
)


def test_a_smaller_tokenizer_of_larger_pictures_is_refused(tmp_path):
    letter = run_invalid(
        *SUPERRES,
        "--tokenizer",
        tokenizer(16),
        "--data.size",
        "16",
        "--low-res-tokenizer",
        tokenizer(32),
        "--out",
        tmp_path / "run",
    )
    assert "16" in letter and "32" in letter


def test_smaller_pictures_that_do_not_divide_the_larger_ones_are_refused(tmp_path):
    odd = another_tokenizer(tmp_path / "odd", size=24)
    letter = run_invalid(
        *SUPERRES, "--tokenizer", tokenizer(32), "--low-res-tokenizer", odd, "--out", tmp_path / "run"
    )
    assert "(6, 6) symbols" in letter and "(8, 8) places" in letter


def test_the_letter_about_a_missing_smaller_tokenizer_names_its_flag(tmp_path):
    letter = run_invalid(
        *SUPERRES,
        "--tokenizer",
        tokenizer(32),
        "--low-res-tokenizer",
        tmp_path / "nowhere",
        "--out",
        tmp_path / "run",
    )
    assert str(tmp_path / "nowhere") in letter and "--low-res-tokenizer RUN" in letter


def test_both_tokenizers_are_copied(tmp_path):
    engine = engine_in(tmp_path, brief(build_tiny(images_maskgit_superres), 1))
    engine.folder.unlock()
    assert sorted(path.name for path in RunDirectory(tmp_path).parts.iterdir()) == [
        "smaller",
        "tokenizer",
    ]
    grids = {name: codec.grid for name, codec in engine.task.tokenizers.items()}
    assert grids == {"tokenizer": (8, 8), "smaller": (4, 4)}

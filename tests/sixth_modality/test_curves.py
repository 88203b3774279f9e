"""A modality outside the package: it trains, samples, resumes and evaluates like the built-in
ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera import modalities
from tessera.api.generator import Generator
from tessera.api.tokenizer import Tokenizer
from tessera.recipes.registry import read_run
from tessera.run.directory import RunDirectory
from tessera.run.train import build_engine
from tests.cli_runner import tessera
from tests.runs import assert_same_run
from tests.sixth_modality import curves

MAX_LINES = 150
STEPS = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write slow and fast waves, in folders of these names."""
    root, rng = tmp_path_factory.mktemp("curves"), np.random.default_rng(0)
    for name, turns in (("slow", 1), ("fast", 4)):
        (root / "data" / name).mkdir(parents=True)
        for i in range(16):
            values = np.sin(2 * np.pi * (turns * np.linspace(0, 1, 32) + rng.random()))
            np.savetxt(root / "data" / name / f"{i:02d}.csv", values, delimiter=",")
    return root


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    modalities.register(curves.MODALITY)
    yield
    modalities.MODALITIES.pop(curves.MODALITY.name)


@pytest.fixture(scope="module")
def runs(folder: Path, registered: None) -> Path:
    """Train a tokenizer and a generator with the command line."""
    data = ["--data", folder / "data"]
    every = ["--validate-every", "300", "--sample-every", "300", "--checkpoint-every", "100"]
    tokenizer = folder / "tokenizer"
    result = tessera("train", "curves-tokenizer", *data, *every, "--out", tokenizer)
    assert result.code == 0, result.text
    result = tessera(
        "train",
        "curves-maskgit",
        "--tokenizer",
        tokenizer,
        *data,
        *every,
        "--out",
        folder / "maskgit",
    )
    assert result.code == 0, result.text
    return folder


def read_metrics(run: Path) -> dict[str, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads([line for line in lines if '"validation"' in line][-1])


def test_the_modality_takes_fewer_than_150_lines():
    lines = Path(curves.__file__).read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.strip()) for line in lines) < MAX_LINES


def test_the_tokenizer_reconstructs_held_out_curves(runs: Path):
    """A constant curve would have an error of 0.5."""
    assert read_metrics(runs / "tokenizer")["val_ema/mse"] < 0.02
    tokenizer = Tokenizer.load(runs / "tokenizer")
    wave = np.loadtxt(runs / "data" / "slow" / "00.csv", delimiter=",", dtype=np.float32)
    codes = tokenizer.encode(torch.from_numpy(wave)[None])
    assert codes.shape == (1, 8)


def test_the_generator_follows_its_prompts(runs: Path):
    """Fast waves change their sign more often than slow ones."""
    generator = Generator.load(runs / "maskgit")
    changes = {
        prompt: np.mean(
            [
                (np.diff(np.sign(curve.values)) != 0).sum()
                for curve in generator.generate([prompt] * 8, seed=1).media
            ]
        )
        for prompt in ("slow", "fast")
    }
    assert changes["slow"] < 4 < changes["fast"]


def test_the_command_line_samples_and_evaluates_it(runs: Path):
    result = tessera("sample", runs / "maskgit", "--prompt", "fast", "--count", "2")
    assert result.code == 0, result.text
    [samples] = (runs / "maskgit" / "samples").glob("by-hand-*")
    assert (samples / "sheet.csv").exists() and (samples / "0001.csv").exists()
    result = tessera("evaluate", runs / "tokenizer")
    assert result.code == 0 and "mse" in result.out


def test_a_resumed_run_equals_an_uninterrupted_one(runs: Path):
    """The run is first trained for 100 steps, then resumed to 300."""
    again = runs / "again"
    every = ["--validate-every", "300", "--sample-every", "300", "--checkpoint-every", "100"]
    command = ["train", "curves-tokenizer", "--data", runs / "data", *every, "--out", again]
    steps = build_engine(read_run(RunDirectory(runs / "tokenizer")), RunDirectory(again)).steps()
    for _ in range(120):
        next(steps)
    steps.close()
    assert not (again / "checkpoints" / f"{STEPS:06d}").exists()
    result = tessera(*command)
    assert result.code == 0 and "Resuming from step 100" in result.out, result.text
    assert_same_run(runs / "tokenizer", again, STEPS)


def test_an_unreadable_file_is_skipped(runs: Path, tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    for i in range(8):
        np.savetxt(data / f"{i}.csv", np.zeros(32), delimiter=",")
    (data / "bad.csv").write_text("not,a,number")
    result = tessera("tokenize", runs / "tokenizer", "--data", data, "--out", tmp_path / "codes")
    assert result.code == 0 and "8 of 9 examples" in result.out, result.text

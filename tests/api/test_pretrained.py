"""Tests of exports: complete, without the optimizer, and the same model as the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import PIL.Image
import pytest
import torch
from safetensors import safe_open

from tessera import Generator, Search, Tokenizer
from tessera.recipes.registry import get_recipe
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera
from tests.hub_server import Hub, serve_hub
from tests.runs import build_tiny, tokenizer, train_once

GENERATORS = ("images-maskgit", "images-maskgit-superres", "meshes-tree")


PARTS = {
    "images-maskgit": ("tokenizer",),
    "images-maskgit-superres": ("tokenizer", "low_res_tokenizer"),
}
"""The tokenizers of generators."""


def trained(recipe: str) -> str:
    """Return a tiny run that was trained for a few steps."""
    if recipe == "images-vqgan":
        return tokenizer()
    return train_once(f"export-{recipe}", build_tiny(get_recipe(recipe)))


def list_files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("recipe", ["images-vqgan", "music-mulan", *GENERATORS])
def test_an_export_has_what_using_it_needs_and_nothing_else(recipe, tmp_path):
    run, out = trained(recipe), tmp_path / "export"
    assert tessera("export", run, "--out", out).code == 0
    files = list_files(out)
    parts = {str(Path(file).parent) for file in files if file.endswith("model.safetensors")}
    assert all(f"{part}/config.json" in files or part == "." for part in parts)
    expected = {"config.json", "model.safetensors", "README.md"}
    assert expected <= files and not [file for file in files if "optimizer" in file]
    assert {Path(file).name for file in files} <= expected | {"sample.png", "classes.json"}
    assert parts == {".", *(f"dependencies/{name}" for name in PARTS.get(recipe, ()))}
    text = "".join((out / file).read_text() for file in files if file.endswith((".json", ".md")))
    assert str(Path(run).parent) not in text and str(tmp_path) not in text
    with safe_open(out / "model.safetensors", "pt") as weights:
        assert not [name for name in weights.keys() if "discriminator" in name]  # noqa: SIM118


@pytest.mark.parametrize("recipe", GENERATORS[:1])
def test_an_exported_generator_makes_the_same_samples(recipe, tmp_path):
    run = trained(recipe)
    Generator.load(run).save_pretrained(tmp_path / "export")
    copy = Generator.from_pretrained(tmp_path / "export")
    left, right = (
        one.generate(["a red circle"], count=2, seed=3).codes for one in (Generator.load(run), copy)
    )
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
    assert tessera("sample", tmp_path / "export", "--prompt", "red", "--count", "1").code == 0


def test_an_exported_tokenizer_has_the_same_codes_and_fingerprint(tmp_path):
    run = Tokenizer.load(trained("images-vqgan"))
    again = Tokenizer.from_pretrained(run.save_pretrained(tmp_path / "one"))
    last = Tokenizer.from_pretrained(again.save_pretrained(tmp_path / "two"))
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    codes = [one.encode(pixels) for one in (run, again, last)]
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[0], codes[2])
    assert run.fingerprint == last.fingerprint and last.trained.steps == run.trained.steps
    assert list_files(tmp_path / "one") == list_files(tmp_path / "two")
    assert last.trained.notices == []


def test_a_generator_trains_on_an_exported_tokenizer(tmp_path):
    Tokenizer.load(trained("images-vqgan")).save_pretrained(tmp_path / "tokenizer")
    command = ("train", "images-maskgit", "--preset", "tiny", "--steps", "1")
    paths = ("--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "run")
    assert tessera(*command, *paths).code == 0


def test_the_card_has_the_numbers_of_the_run_and_a_picture(tmp_path):
    run = Path(trained("images-vqgan"))
    assert tessera("evaluate", run, "--samples", "0", "--out", run / "evaluation.json").code == 0
    Tokenizer.load(run).save_pretrained(tmp_path / "export")
    card = (tmp_path / "export/README.md").read_text()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "validation"][-1]
    evaluated = json.loads((run / "evaluation.json").read_text())["metrics"]["ema"]
    assert card.count(f"| psnr | {last['val_ema/psnr']:.5g} |") >= 1
    assert f"| psnr | {evaluated['psnr']:.5g} |" in card
    assert "![Samples](sample.png)" in card
    with PIL.Image.open(tmp_path / "export/sample.png") as picture:
        assert min(picture.size) > 16


def test_an_export_is_not_resumed_or_overwritten(tmp_path):
    out = Tokenizer.load(trained("images-vqgan")).save_pretrained(tmp_path / "export")
    message = run_invalid("train", "images-vqgan", "--preset", "tiny", "--out", out)
    assert "copy for inference" in message
    assert "is not empty" in run_invalid("export", trained("images-vqgan"), "--out", out)
    with pytest.raises(UserError, match="EMA weights only"):
        Tokenizer.load(out, weights="raw")


@pytest.mark.parametrize("damage", ["weights", "config", "missing"])
def test_a_damaged_export_gets_a_sentence(damage, tmp_path):
    out = Tokenizer.load(trained("images-vqgan")).save_pretrained(tmp_path / "export")
    if damage == "weights":
        (out / "model.safetensors").write_bytes(b"\x00" * 100)
    elif damage == "config":
        (out / "config.json").write_text("{")
    else:
        (out / "model.safetensors").unlink()
    with pytest.raises(UserError):
        Tokenizer.from_pretrained(out)


# ---- the hub


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    with serve_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
        yield running


def test_a_model_is_uploaded_downloaded_and_then_found_offline(hub, tmp_path):
    generator = Generator.load(trained("images-maskgit"))
    generator.push_to_hub("user/shapes", token="hf_test")
    stored = hub.repositories["user/shapes"]
    assert hub.private["user/shapes"]
    assert "dependencies/tokenizer/model.safetensors" in stored
    assert b'from_pretrained("user/shapes", download=True)' in stored["README.md"]
    stored["evil.pkl"] = b"not downloaded"
    hub.requests.clear()
    with pytest.raises(UserError, match="was not downloaded from the hub before"):
        Generator.from_pretrained("user/shapes")
    assert hub.requests == []
    copy = Generator.from_pretrained("user/shapes", download=True)
    left, right = (one.generate(["red"], seed=1).codes[0] for one in (generator, copy))
    assert torch.equal(left, right)
    assert not [one for one in hub.requests if "evil" in one]
    hub.requests.clear()
    again = Generator.from_pretrained("user/shapes")
    assert torch.equal(again.generate(["red"], seed=1).codes[0], left) and hub.requests == []


def test_unknown_names_and_missing_repositories_get_a_sentence(hub):
    with pytest.raises(UserError, match="neither a folder nor the name of a repository"):
        Tokenizer.from_pretrained("runs/some/missing/folder")
    with pytest.raises(UserError, match="could not be reached on the hub"):
        Search.from_pretrained("user/missing", download=True)
    with pytest.raises(UserError, match="give it as user/name"):
        Tokenizer.load(trained("images-vqgan")).push_to_hub("nameless")


def test_a_generator_of_two_runs_is_not_saved_as_one(tmp_path):
    runs = trained("images-maskgit"), trained("images-maskgit-superres")
    with pytest.raises(UserError, match="two folders"):
        Generator.load(*runs).save_pretrained(tmp_path / "export")

"""bench/sampling.py: a row for each setting, and results that are there are not repeated."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from tessera import Generator
from tessera.modalities.image.media import Image
from tessera.modalities.image.recipes import images_maskgit
from tests.runs import build_tiny, train

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def sampling(monkeypatch):
    """The bench script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("sampling")


def test_settings_are_compared_once(sampling, tmp_path, monkeypatch, capsys):
    train(tmp_path / "run", build_tiny(images_maskgit))
    out, run = tmp_path / "results.jsonl", str(tmp_path / "run")
    arguments = [run, "--samples", "8", "--out", str(out), "--only"]
    assert sampling.main([*arguments, "guidance 1"]) == 0
    assert sampling.main([*arguments, "guidance 1", "halton"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["setting"] for line in lines] == ["guidance 1", "halton"]
    assert {"frechet_lite0", "recall", "caption_R@1", "prompt_match", "cpu_s"} <= lines[0].keys()
    monkeypatch.setattr(sampling, "compare_settings", None)
    capsys.readouterr()
    assert sampling.main([*arguments, "halton"]) == 0
    rows = [row.split("|")[1].strip() for row in capsys.readouterr().out.splitlines()]
    assert rows == ["setting", "---", "real images", "guidance 1", "halton"]


def test_settings_of_the_command_line_are_compared_on_one_half(sampling, tmp_path):
    train(tmp_path / "run", build_tiny(images_maskgit))
    out, setting = tmp_path / "results.jsonl", "order=halton decoding_steps=2 scale=1"
    arguments = [str(tmp_path / "run"), "--samples", "4", "--out", str(out), "--half", "second"]
    assert sampling.main([*arguments, "--only", "reconstructions", "--also", setting]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["setting"] for line in lines] == ["reconstructions", setting]
    assert sampling.parse_setting(setting) == {
        "sampling": {"order": "halton", "decoding_steps": 2},
        "guidance": {"scale": 1},
    }


@pytest.mark.parametrize("split", ["held-out", "train"])
def test_reference_images_are_those_of_the_split(sampling, tmp_path, split):
    train(tmp_path / "run", build_tiny(images_maskgit))
    generator = Generator.load(tmp_path / "run")
    args = argparse.Namespace(split=split, half=None, samples=4, data=None)
    reference = sampling.choose_reference(generator, args)
    data = generator.data.without_augmentation().build(True)
    expected = data.train if split == "train" else data.validation
    assert len(reference.chosen) == 4 and len(reference.validation) == len(expected)
    names = {expected.name(index) for index in range(len(expected))}
    assert {reference.validation.name(index) for index in reference.chosen} <= names


def test_reference_images_can_be_those_of_another_folder(sampling, tmp_path):
    train(tmp_path / "run", build_tiny(images_maskgit))
    (tmp_path / "other").mkdir()
    for number in range(40):
        Image(np.full((16, 16, 3), number, np.uint8)).save(tmp_path / "other" / f"{number:02}")
    generator = Generator.load(tmp_path / "run")
    args = argparse.Namespace(split="held-out", half=None, samples=2, data=tmp_path / "other")
    reference = sampling.choose_reference(generator, args)
    names = {reference.validation.name(index) for index in reference.chosen}
    assert names and names <= {f"{number:02}.png" for number in range(40)}

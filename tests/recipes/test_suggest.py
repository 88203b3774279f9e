"""The commands that `tessera check` suggests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.cli import flags
from tessera.data.inspect import Report
from tessera.modalities import MODALITIES
from tessera.modalities.image.recipes import images_vqgan
from tessera.recipes.registry import get_recipe
from tessera.recipes.suggest import suggest_commands, suggest_steps
from tests.cli_runner import tessera


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write grey images of 28 pixels in two classes, into a folder with a space in its name."""
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (28, 28), np.uint8)
        path = tmp_path / "my images" / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(pixels).save(path)
    return tmp_path / "my images"


def suggested(folder: Path) -> list[list[str]]:
    content = json.loads(tessera("check", folder, "--json").out)
    return [shlex.split(command) for command in content["commands"]]


def test_suggested_commands_fit_the_folder_and_each_other(folder):
    first, second = suggested(folder)
    runs = [flags.parse(get_recipe(one[2]), one[3:]) for one in (first, second)]
    assert [one[:3] for one in (first, second)] == [
        ["tessera", "train", "images-vqgan"],
        ["tessera", "train", "images-maskgit"],
    ]
    assert runs[0].run.data.path == runs[1].run.data.path == str(folder)
    assert (runs[0].run.data.size, runs[0].run.data.channels) == (28, 1)
    assert runs[1].run.task.tokenizer == runs[0].out == "runs/my images-vqgan"
    assert runs[1].run.task.uses_captions


def test_generator_without_captions_is_suggested_without_text(folder):
    single = folder / "cat"
    second = suggested(single)[1]
    run = flags.parse(get_recipe(second[2]), second[3:]).run
    assert not run.task.uses_captions


def test_commands_are_printed_below_the_report(folder):
    assert "To train on it: tessera train images-vqgan --data" in tessera("check", folder).text


def test_larger_folders_are_trained_longer_up_to_a_limit():
    run = images_vqgan()
    few, many, most = (suggest_steps(run, count) for count in (100, 4000, 10**6))
    assert few == run.engine.steps
    assert many * run.engine.batch_size == pytest.approx(4000 * 20, rel=0.1)
    assert most == 8 * run.engine.steps


@pytest.mark.parametrize("modality", [name for name, one in MODALITIES.items() if one.inspect])
def test_every_modality_suggests_commands_that_can_be_parsed(modality):
    report = Report(
        path="files",
        usable=100,
        bytes=0,
        sizes=None,
        captioned=0,
        captions={},
        caption_error="",
        duplicates=[],
        unusable=[],
        other_files="",
    )
    commands = [shlex.split(one) for one in suggest_commands(report, MODALITIES[modality])]
    outs: list[str | None] = []
    for _, _, recipe, *arguments in commands:
        parsed = flags.parse(get_recipe(recipe), arguments)
        assert parsed.run.data.path == "files"
        assert set(parsed.run.task.dependencies().values()) <= set(outs)
        outs.append(parsed.out)
    assert outs

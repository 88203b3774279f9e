"""The commands that `tessera check` suggests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import soundfile

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
    commands = [shlex.split(one) for one in suggest_commands(report, MODALITIES[modality]).commands]
    outs: list[str | None] = []
    for _, _, recipe, *arguments in commands:
        parsed = flags.parse(get_recipe(recipe), arguments)
        assert parsed.run.data.path == "files"
        assert set(parsed.run.task.dependencies().values()) <= set(outs)
        outs.append(parsed.out)
    assert outs


def write_recordings(folder: Path, transcripts: int) -> Path:
    """Write four recordings in two folders, some of them with a transcript."""
    for number in range(4):
        file = folder / "voices" / ("ann" if number % 2 else "ben") / f"{number}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).uniform(-0.3, 0.3, 8_000)
        soundfile.write(file, noise, 16_000)
        if number < transcripts:
            file.with_suffix(".txt").write_text(f"word {number}")
    return folder / "voices"


def test_recordings_with_transcripts_are_suggested_for_text_to_speech(tmp_path):
    folder = write_recordings(tmp_path, 4)
    runs = [flags.parse(get_recipe(one[2]), one[3:]) for one in suggested(folder)]
    names = ["audio-codec", "audio-semantic", "audio-soundstorm", "audio-text2semantic"]
    assert [one.run.recipe for one in runs] == names
    codec, semantic, soundstorm, speech = runs
    assert semantic.run.task.uses_captions, "the recogniser is trained on the transcripts"
    assert soundstorm.run.task.dependencies() == {"tokenizer": codec.out, "semantic": semantic.out}
    assert speech.run.task.dependencies() == {"tokenizer": semantic.out}
    assert speech.run.task.companions() == {"soundstorm": soundstorm.out}
    text = tessera("check", folder).text
    assert "The captions must be transcripts." in text and "no transcript" not in text


def test_recordings_without_a_transcript_are_mentioned_beside_the_commands(tmp_path):
    text = tessera("check", write_recordings(tmp_path, 3)).text
    assert "tessera train audio-text2semantic" in text
    assert "audio-semantic: 1 of 4 recordings have no transcript: the codebook is" in text
    assert "audio-text2semantic: 1 of 4 recordings have no transcript and are left out." in text


def test_names_of_folders_are_no_transcripts(tmp_path):
    report = json.loads(tessera("check", write_recordings(tmp_path, 0), "--json").out)
    assert report["captions"] == {"folder names": 4} and report["remarks"] == []
    commands = [shlex.split(one) for one in report["commands"]]
    assert [one[2] for one in commands] == ["audio-codec", "audio-semantic", "audio-soundstorm"]
    assert not any("--features" in one for one in commands)

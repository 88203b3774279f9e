"""All commands on runs of music: training, metrics, samples, and requests that are rejected."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tessera.modalities.audio.media import Audio
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.music.synthetic import SyntheticMusic
from tests.cli_runner import run_invalid, tessera

TRAIN = ("train", "music-mulan", "--preset", "tiny")


@pytest.fixture(scope="module")
def music(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write twenty audio files, 18 of them with captions and tags."""
    folder = tmp_path_factory.mktemp("music")
    dataset = SyntheticMusic(20, samples=4000, rate_hz=8000)
    lines = []
    for number in range(20):
        name = f"{number:02d}.flac"
        example = dataset.item(number, np.random.default_rng(number))
        Audio(example.samples, 8000).write(folder / name)
        if number < 18:
            captions, tags = dataset.all_captions(number), list(example.tags)
            lines.append(json.dumps({"file_name": name, "text": captions, "tags": tags}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(music: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mulan"
    flags = ("--data", music, "--data.val-fraction", "0.4", "--steps", "4", "--batch-size", "4")
    result = tessera(*TRAIN, *flags, "--out", folder)
    assert result.code == 0, result
    assert "2 example(s) have no caption and are left out" in result.out
    return folder


def test_evaluation_has_recall_ranks_chance_and_tags(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "evaluation.json"
    result = tessera("evaluate", run, "--out", out)
    assert result.code == 0, result
    metrics = json.loads(out.read_text())["metrics"]["ema"]
    directions = ("text_to_media", "media_to_text")
    recalls = {f"{direction}_R@{k}" for direction in directions for k in (1, 5, 10)}
    ranks = {f"{direction}_median_rank" for direction in directions}
    assert recalls | ranks | {"chance_R@1", "tag_auc"} <= metrics.keys()
    assert all(0 <= metrics[name] <= 1 for name in recalls | {"tag_auc"})


def test_folder_is_evaluated_if_it_has_captions(run: Path, music: Path, tmp_path: Path) -> None:
    out = tmp_path / "evaluation.json"
    result = tessera("evaluate", run, "--data", music, "--out", out, "--batch-size", "7")
    assert result.code == 0, result
    metrics = json.loads(out.read_text())["metrics"]["ema"]
    assert metrics["chance_R@1"] == pytest.approx(1 / 18)
    uncaptioned = tmp_path / "uncaptioned"
    uncaptioned.mkdir()
    for name in ("18.flac", "19.flac"):
        shutil.copy(music / name, uncaptioned)
    message = run_invalid("evaluate", run, "--data", uncaptioned, "--out", tmp_path / "none.json")
    assert "nothing can be evaluated" in message and not (tmp_path / "none.json").exists()


def test_samples_are_audio_captions_and_similarities(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples"
    result = tessera("sample", run, "--count", "4", "--out", out)
    assert result.code == 0, result
    names = {file.name for file in out.iterdir()}
    assert {"0000.wav", "0000.txt", "0003.wav", "sheet.png", "sheet.txt", "settings.json"} <= names
    assert f"tessera index {run} --data FOLDER" in result.out and "tessera search" in result.out
    message = run_invalid("sample", run, "--prompt", "a harp")
    assert "generates nothing" in message and "tessera search INDEX 'a harp'" in message


def test_batch_of_one_is_rejected(tmp_path: Path) -> None:
    message = run_invalid(*TRAIN, "--batch-size", "1", "--out", tmp_path / "run")
    assert "compares examples with each other, but the batch size is 1" in message
    assert "--batch-size 2" in message and not (tmp_path / "run").exists()
    result = tessera(*TRAIN, "--batch-size", "2", "--dry-run")
    assert result.code == 0, result


def test_text_encoder_cannot_be_disabled() -> None:
    message = run_invalid("train", "music-mulan", "--text", "none")
    assert "The text encoder is 'none'" in message and "use --text learned" in message


def test_data_with_another_sampling_rate_are_rejected() -> None:
    run = music_mulan("tiny")
    with pytest.raises(ValueError, match="use --data.rate-hz 8000"):
        dataclasses.replace(run, data=dataclasses.replace(run.data, rate_hz=16000))

"""Music by every verb: learnt from, measured, shown; and what is refused or told before the first
step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tessera.modalities.audio.media import Audio
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.music.synthetic import SyntheticMusic
from tests.cli_runner import tessera


@pytest.fixture(scope="module")
def music(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty clips, of which two have no caption; tags of all."""
    folder = tmp_path_factory.mktemp("music")
    num_synthetic, lines = SyntheticMusic(20, samples=4000, rate_hz=8000), []
    for number in range(20):
        example = num_synthetic.item(number, np.random.default_rng(number))
        Audio(example.samples, 8000).write(folder / f"{number:02d}.flac")
        if number < 18:
            lines.append(
                {
                    "file_name": f"{number:02d}.flac",
                    "text": num_synthetic.all_captions(number),
                    "tags": list(example.tags),
                }
            )
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def run(music: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "ear"
    said = tessera(
        "train",
        "music-mulan",
        "--preset",
        "tiny",
        "--data",
        str(music),
        "--data.val-fraction",
        "0.4",
        "--out",
        str(place),
        "--steps",
        "4",
        "--batch-size",
        "4",
    )
    assert said.code == 0, said.err
    assert "2 example(s) have no caption and are left out" in said.out
    return place


def test_a_run_tells_ranks_chance_and_tags(run: Path, tmp_path: Path) -> None:
    said = tessera("evaluate", str(run), "--out", str(tmp_path / "numbers.json"))
    assert said.code == 0, said.err
    numbers = json.loads((tmp_path / "numbers.json").read_text())["numbers"]["ema"]
    assert {
        "by_text_r1",
        "by_text_r10",
        "by_text_median_rank",
        "by_media_r1",
        "chance_r1",
        "tag_auc",
    } <= numbers.keys()
    assert all(0 <= numbers[name] <= 1 for name in ("by_text_r1", "by_media_r10", "tag_auc"))


def test_any_folder_can_be_measured_on_if_it_has_captions(
    run: Path, music: Path, tmp_path: Path
) -> None:
    said = tessera(
        "evaluate",
        str(run),
        "--data",
        str(music),
        "--out",
        str(tmp_path / "numbers.json"),
        "--batch-size",
        "7",
    )
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "numbers.json").read_text())["numbers"]["ema"][
        "chance_r1"
    ] == pytest.approx(1 / 18)
    for name in ("18", "19"):
        (tmp_path / "bare").mkdir(exist_ok=True)
        (tmp_path / "bare" / f"{name}.flac").write_bytes((music / f"{name}.flac").read_bytes())
    said = tessera(
        "evaluate", str(run), "--data", str(tmp_path / "bare"), "--out", str(tmp_path / "none.json")
    )
    assert said.code == 2 and "nothing can be measured" in said.err


def test_samples_are_clips_captions_and_the_matrix(run: Path, tmp_path: Path) -> None:
    said = tessera("sample", str(run), "--count", "4", "--out", str(tmp_path / "matches"))
    assert said.code == 0, said.err
    names = {file.name for file in (tmp_path / "matches").iterdir()}
    assert {"0000.wav", "0000.txt", "0003.wav", "sheet.png", "sheet.txt", "settings.json"} <= names
    assert tessera("sample", str(run), "--prompt", "a harp").code == 2


def test_a_batch_of_one_is_refused(tmp_path: Path) -> None:
    said = tessera(
        "train",
        "music-mulan",
        "--preset",
        "tiny",
        "--batch-size",
        "1",
        "--out",
        str(tmp_path / "run"),
    )
    assert (
        said.code == 2
        and "in a batch of 1 there is nothing to compare" in said.err
        and not (tmp_path / "run").exists()
    )
    said = tessera("train", "music-mulan", "--preset", "tiny", "--batch-size", "2", "--dry-run")
    assert said.code == 0, said.err


def test_something_must_read_the_texts() -> None:
    said = tessera("train", "music-mulan", "--text", "none")
    assert said.code == 2 and "so something must read them" in said.err


def test_another_rate_than_the_network_hears_is_refused() -> None:
    run = music_mulan("tiny")
    with pytest.raises(ValueError, match="use --data.rate-hz 8000"):
        dataclasses.replace(run, data=dataclasses.replace(run.data, rate_hz=16000))

"""examples/real_voice.py, with noise in place of recordings."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tessera.modalities.audio.media import Audio

EXAMPLE = Path(__file__).parents[2] / "examples" / "real_voice.py"


@pytest.fixture
def real_voice(monkeypatch):
    spec = importlib.util.spec_from_file_location("real_voice_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "NUM_TEST", 3)
    return module


def write_folder(folder: Path, sentences: dict[str, tuple[str, float]]) -> None:
    """Write recordings of a number of seconds and their transcripts."""
    lines = []
    for name, (text, seconds) in sentences.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Audio(np.zeros((1, round(8000 * seconds)), np.float32), 8000).write(folder / name)
        lines.append(json.dumps({"file_name": name, "text": text}))
    (folder / "metadata.jsonl").write_text("".join(f"{line}\n" for line in lines))


def read_metadata(folder: Path) -> dict[str, str]:
    lines = (folder / "metadata.jsonl").read_text().splitlines()
    return {record["file_name"]: record["text"] for record in map(json.loads, lines)}


def test_no_sentence_is_in_both_sets_and_running_again_adds_nothing(
    real_voice, tmp_path, monkeypatch
):
    sentences = {f"en/{i}.flac": (f"this is number {i // 2}", 1.5) for i in range(12)}
    sentences |= {"en/short.flac": ("one", 0.5), "en/long.flac": ("a very long one", 4.5)}
    sentences["fr/un.flac"] = ("un deux trois", 1.5)
    write_folder(tmp_path / "prompts", sentences)
    for part in ("train", "test"):
        write_folder(tmp_path / "voices" / part, {"robot/0000.flac": ("a robot speaks", 1.0)})
    arguments = ["real_voice.py", str(tmp_path / "prompts"), str(tmp_path / "voices")]
    monkeypatch.setattr(sys, "argv", arguments)

    real_voice.main()
    first = {part: read_metadata(tmp_path / "voices" / part) for part in ("train", "test")}
    real_voice.main()
    again = {part: read_metadata(tmp_path / "voices" / part) for part in ("train", "test")}
    assert first == again
    train, test = (
        {name: text for name, text in again[part].items() if name.startswith("allison/")}
        for part in ("train", "test")
    )
    assert len(test) == 3 and not set(test.values()) & set(train.values())
    assert "allison/short.flac" in train and "allison/long.flac" not in {*train, *test}
    assert "allison/un.flac" not in {*train, *test}
    for part in ("train", "test"):
        assert again[part]["robot/0000.flac"] == "a robot speaks"
        assert all((tmp_path / "voices" / part / name).is_file() for name in first[part])


def test_a_folder_without_metadata_is_an_error(real_voice, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["real_voice.py", str(tmp_path), str(tmp_path)])
    with pytest.raises(SystemExit, match="has no metadata.jsonl"):
        real_voice.main()

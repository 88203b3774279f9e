"""examples/voices.py, with tones instead of the speech of espeak-ng and flite."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.media import Audio

EXAMPLE = Path(__file__).parents[2] / "examples" / "voices.py"


@pytest.fixture
def voices(monkeypatch):
    """The example as a module, whose voices are tones of one voice's pitch."""
    spec = importlib.util.spec_from_file_location("voices_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "voices_example", module)  # dataclasses look it up
    spec.loader.exec_module(module)

    def synthesize(voice, sentence: str) -> Audio:
        hertz = 100 + 7 * sum(map(ord, f"{voice.voice} {voice.pitch}")) % 300
        seconds = np.arange(80 * len(sentence)) / module.RATE_HZ
        tone = np.sin(2 * np.pi * hertz * seconds).astype(np.float32)
        return module.trim(Audio(np.pad(0.3 * tone, 9_000)[None], module.RATE_HZ))

    monkeypatch.setattr(module, "synthesize", synthesize)
    monkeypatch.setattr(module, "check_tools", lambda: None)
    return module


def test_sentences_and_voices_of_the_test_are_held_out(voices, tmp_path, monkeypatch, capsys):
    arguments = ["voices.py", str(tmp_path), "--sentences", "2", "--test-sentences", "3"]
    monkeypatch.setattr(sys, "argv", arguments)
    voices.main()
    assert "648 recordings with transcripts" in capsys.readouterr().out
    texts, folders = {}, {}
    for part in ("train", "test"):
        lines = (tmp_path / part / "metadata.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        texts[part] = [row["text"] for row in rows]
        folders[part] = {row["file_name"].split("/")[0] for row in rows}
        dataset = AudioDataConfig(path=str(tmp_path / part), seconds=1.0).full()
        assert [dataset.caption(i) for i in range(len(dataset))] == texts[part] or part == "train"
        assert len(dataset) == len(rows) and all(map(dataset.caption, range(len(dataset))))
    assert not set(texts["train"]) & set(texts["test"])
    assert len(set(texts["train"])) == 624 and len(set(texts["test"])) == 3
    assert len(folders["test"] & folders["train"]) == len(folders["test"] - folders["train"]) == 4


def test_a_variant_that_the_program_ignores_is_an_error(voices, monkeypatch):
    synthesize = voices.synthesize

    def ignore_variant(voice, sentence: str) -> Audio:
        is_british = voice.voice.startswith("en+")
        return synthesize(replace(voice, voice="en") if is_british else voice, sentence)

    voices.check_variants()
    monkeypatch.setattr(voices, "synthesize", ignore_variant)
    with pytest.raises(SystemExit, match=r"espeak-ng speaks en\+f4 as it speaks en, but all"):
        voices.check_variants()


def test_silence_is_trimmed_and_the_peak_is_equal(voices):
    audio = voices.synthesize(voices.TRAIN_VOICES[0], "the dog")
    assert np.abs(audio.samples).max() == pytest.approx(0.7)
    assert audio.seconds == pytest.approx(80 * 7 / 16_000 + 2 * voices.MARGIN_SECONDS, abs=0.01)


def test_names_of_voices_are_names_of_folders(voices):
    names = [one.name for one in (*voices.TRAIN_VOICES, *voices.TEST_VOICES)]
    assert len(set(names)) == len(names) == 316
    assert all(name.replace("-", "").isalnum() for name in names)

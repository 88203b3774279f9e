"""examples/scores.py, with fakes for music21 and the synthesizer, which `make` does not install."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tessera.modalities.music.dataset import MusicDataConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "scores.py"


@pytest.fixture
def scores(monkeypatch):
    spec = importlib.util.spec_from_file_location("scores_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "scores_example", module)  # dataclasses need the entry
    spec.loader.exec_module(module)
    return module


def score(
    *notes: tuple[float, float, int], key: str = "G", mode: str = "minor", metre: str = "3/4"
):
    """Return a score with the attributes of music21 that are used."""
    events = [
        SimpleNamespace(offset=at, quarterLength=length, pitches=[SimpleNamespace(midi=pitch)])
        for at, length, pitch in notes
    ]
    flat = SimpleNamespace(
        notes=events,
        getElementsByClass=lambda kind: [SimpleNamespace(ratioString=metre)] if metre else [],
    )
    tonic = SimpleNamespace(tonic=SimpleNamespace(name=key), mode=mode)
    return SimpleNamespace(flatten=lambda: flat, analyze=lambda what: tonic)


TUNE = score((2.0, 1.0, 60), (3.0, 0.5, 64), (3.0, 0.0, 65))


def play(notes, description, seconds):
    return np.full(round(seconds * 16000), 0.5 if notes else 0.0, np.float32)


def test_audio_files_have_captions_that_the_dataset_reads(tmp_path, scores) -> None:
    given = [
        ("bach-bwv1-6", Path("corpus/bach/bwv1.6.mxl"), TUNE),
        ("ryans-x", Path("corpus/ryansMammoth/HuntTheFoxJig.abc"), TUNE),
    ]
    assert scores.write_dataset(iter(given), play, tmp_path / "out", 10, 1.0) == 2
    lines = [
        json.loads(line) for line in (tmp_path / "out/metadata.jsonl").read_text().splitlines()
    ]
    assert [line["file_name"] for line in lines] == ["bach-bwv1-6.flac", "ryans-x.flac"]
    assert len(lines[0]["text"]) == 4 and lines[0]["text"][0].startswith(
        "chorale by Bach in G minor, 3/4 time, "
    )
    assert {"chorale", "Bach", "minor key", "3/4 time"} <= set(lines[0]["tags"]) and "jig" in lines[
        1
    ]["tags"]
    dataset = MusicDataConfig(path=str(tmp_path / "out"), rate_hz=16000, seconds=1.0).full()
    example = dataset.item(0, np.random.default_rng(0))
    assert (
        example.caption in lines[0]["text"]
        and example.tags == tuple(lines[0]["tags"])
        and example.length == 16000
    )


def test_tempo_and_instrument_are_a_function_of_the_name(scores) -> None:
    path = Path("corpus/bach/bwv1.6.mxl")
    names = [f"name-{number}" for number in range(60)]
    descriptions = [scores.describe(name, path, TUNE) for name in names]
    assert descriptions == [scores.describe(name, path, TUNE) for name in names]
    assert {one.tempo for one in descriptions} == set(scores.TEMPOS)
    assert len({one.instrument for one in descriptions}) > 10
    assert scores.describe("x", path, score(key="B-", mode="major", metre="")).key == "B flat major"
    assert scores.describe("x", path, score(metre="")).metre == "free"


@pytest.mark.parametrize(
    ("path", "composer", "form"),
    [
        ("corpus/palestrina/Gloria_54.krn", "Palestrina", "Gloria of a mass"),
        ("corpus/palestrina/other.krn", "Palestrina", "mass movement"),
        ("corpus/ryansMammoth/BrokenSixpenceReel.abc", "a fiddler", "reel"),
        ("corpus/essenFolksong/han1.abc", "unknown hands", "Chinese folk song"),
        ("corpus/essenFolksong/erk10.abc", "unknown hands", "European folk song"),
        ("corpus/beethoven/opus18no1/movement1.krn", "Beethoven", "string quartet"),
        ("corpus/schumann_clara/opus17/movement3.xml", "Schumann Clara", "piece"),
    ],
)
def test_composer_and_form_follow_from_the_path(
    scores, path: str, composer: str, form: str
) -> None:
    assert scores.composer_and_form(Path(path)) == (composer, form)


def test_notes_start_at_zero_without_grace_notes(scores) -> None:
    assert scores.extract_notes(TUNE) == [(0.0, 1.0, 60), (1.0, 0.5, 64)]


def test_a_repeated_note_is_played_twice(scores) -> None:
    events = scores.note_events([(0.0, 1.0, 60), (1.0, 1.0, 60), (9.0, 1.0, 62)], 60.0, seconds=1.5)
    assert events == [(0, 60, True), (16000, 60, False), (16000, 60, True), (24000, 60, False)]


def test_notes_are_played_at_their_onsets(scores) -> None:
    class Bank:
        def __init__(self, gain: float, samplerate: int):
            assert samplerate == 16000
            self.sounding, self.program = set(), None

        def sfload(self, path: str) -> int:
            return 3

        def sounds_off(self) -> None:
            self.sounding = set()

        def program_select(self, channel: int, bank: int, number: int, preset: int) -> None:
            self.program = (bank, preset)

        def noteon(self, channel: int, pitch: int, velocity: int) -> None:
            self.sounding.add(pitch)

        def noteoff(self, channel: int, pitch: int) -> None:
            self.sounding.discard(pitch)

        def generate(self, count: int) -> memoryview:
            level = np.float32(sum(self.sounding))
            return memoryview(np.tile(np.array([level, 0], np.float32), count).tobytes())

    synth = scores.Synth(Path("bank.sf2"), SimpleNamespace(Synth=Bank))
    description = scores.Description("Bach", "chorale", "G minor", "3/4", "slow", "flute")
    samples = synth.play([(0.0, 1.0, 60), (1.0, 1.0, 64)], description, seconds=2.0)
    quarter = round(60 / scores.TEMPOS["slow"] * 16000)
    assert samples.shape == (32000,) and synth.synth.program == (3, 73)
    assert set(samples[:quarter]) == {30.0} and set(samples[quarter : 2 * quarter]) == {32.0}, (
        "the mean of both channels"
    )


def test_files_of_many_scores_are_split_and_unreadable_ones_skipped(scores, capsys) -> None:
    book = SimpleNamespace(scores=[TUNE] * 100)

    def parse(path, forceSource, storePickle):
        assert forceSource and not storePickle, "nothing is unpickled"
        if "bad" in path.name:
            raise KeyError("odd")
        return book if "book" in path.name else TUNE

    converter = SimpleNamespace(parse=parse)
    names = [
        name
        for path in ("a/book.abc", "a/one.xml", "a/bad.xml")
        for name, _, _ in scores.read_scores(Path(path), converter)
    ]
    assert len(names) == 41 and names[0] == "a-book-000" and names[-1] == "a-one"
    assert "skipped bad.xml: KeyError" in capsys.readouterr().out


def test_silent_and_unreadable_scores_are_skipped(tmp_path, scores, capsys) -> None:
    given = [
        ("silent", Path("corpus/bach/x.mxl"), score()),
        ("odd", Path("corpus/bach/x.mxl"), SimpleNamespace()),
    ]
    assert scores.write_dataset(iter(given), play, tmp_path / "deep/out", 10, 1.0) == 0
    output = capsys.readouterr().out
    assert "skipped silent: its first 1 seconds are silent" in output
    assert "skipped odd: AttributeError" in output


def test_file_names_cannot_be_paths(scores) -> None:
    assert scores.sanitize("../../etc/passwd") == "etc-passwd"
    assert scores.sanitize("???") == "unnamed"


def test_every_collection_is_represented_among_the_first_files(scores) -> None:
    paths = [Path(f"corpus/bach/{n}.mxl") for n in range(90)] + [
        Path(f"corpus/haydn/{n}.mxl") for n in range(10)
    ]
    first = scores.choose_files(paths, 20)
    assert len(first) == 20 and sum("haydn" in str(path) for path in first) == 2
    assert (
        scores.choose_files(paths[::-1], 20) == first
        and len(scores.choose_files(paths, 1000)) == 100
    )


def test_missing_music21_is_reported(tmp_path, scores, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "music21", None)
    monkeypatch.setattr(sys, "argv", ["scores.py", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="needs music21, which is not installed"):
        scores.main()
    assert not (tmp_path / "out").exists()

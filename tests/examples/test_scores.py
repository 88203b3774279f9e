"""Scores become clips with true captions; music21 and the bank are stood in for, since `make` does
not install them."""

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
    monkeypatch.setitem(sys.modules, "scores_example", module)  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def score(
    *notes: tuple[float, float, int], key: str = "G", mode: str = "minor", metre: str = "3/4"
):
    """As music21 would give it."""
    heard = [
        SimpleNamespace(offset=at, quarterLength=length, pitches=[SimpleNamespace(midi=pitch)])
        for at, length, pitch in notes
    ]
    flat = SimpleNamespace(
        notes=heard,
        getElementsByClass=lambda kind: [SimpleNamespace(ratioString=metre)] if metre else [],
    )
    tonic = SimpleNamespace(tonic=SimpleNamespace(name=key), mode=mode)
    return SimpleNamespace(flatten=lambda: flat, analyze=lambda what: tonic)


TUNE = score((2.0, 1.0, 60), (3.0, 0.5, 64), (3.0, 0.0, 65))


def played(notes, facts, seconds):
    return np.full(round(seconds * 16000), 0.5 if notes else 0.0, np.float32)


def test_clips_come_with_captions_that_the_data_reads(tmp_path, scores) -> None:
    given = [
        ("bach-bwv1-6", Path("corpus/bach/bwv1.6.mxl"), TUNE),
        ("ryans-x", Path("corpus/ryansMammoth/HuntTheFoxJig.abc"), TUNE),
    ]
    assert scores.lay_out(iter(given), played, tmp_path / "out", 10, 1.0) == 2
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
    source = MusicDataConfig(path=str(tmp_path / "out"), rate_hz=16000, seconds=1.0).full()
    example = source.item(0, np.random.default_rng(0))
    assert (
        example.caption in lines[0]["text"]
        and example.tags == tuple(lines[0]["tags"])
        and example.length == 16000
    )


def test_tempo_and_instrument_are_the_scores_own_and_the_same_everywhere(scores) -> None:
    path = Path("corpus/bach/bwv1.6.mxl")
    facts = [scores.facts_of(f"name-{number}", path, TUNE) for number in range(60)]
    assert facts == [scores.facts_of(f"name-{number}", path, TUNE) for number in range(60)]
    assert {fact.tempo for fact in facts} == set(scores.TEMPOS) and len(
        {fact.instrument for fact in facts}
    ) > 10
    assert scores.facts_of("x", path, score(key="B-", mode="major", metre="")).key == "B flat major"
    assert scores.facts_of("x", path, score(metre="")).metre == "free"


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
def test_collections_tell_what_a_score_is(scores, path: str, composer: str, form: str) -> None:
    assert scores.form_of(Path(path)) == (composer, form)


def test_notes_begin_with_the_first_and_grace_notes_are_left_out(scores) -> None:
    assert scores.notes_of(TUNE) == [(0.0, 1.0, 60), (1.0, 0.5, 64)]


def test_a_note_that_is_repeated_is_heard_twice(scores) -> None:
    events = scores.events([(0.0, 1.0, 60), (1.0, 1.0, 60), (9.0, 1.0, 62)], 60.0, seconds=1.5)
    assert events == [(0, 60, True), (16000, 60, False), (16000, 60, True), (24000, 60, False)]


def test_the_bank_plays_the_notes_when_they_are_due(scores) -> None:
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
            self.sounding.rollback(pitch)

        def generate(self, count: int) -> memoryview:
            level = np.float32(sum(self.sounding))
            return memoryview(np.tile(np.array([level, 0], np.float32), count).tobytes())

    synth = scores.Synth(Path("bank.sf2"), SimpleNamespace(Synth=Bank))
    facts = scores.Facts("Bach", "chorale", "G minor", "3/4", "slow", "flute")
    sound = synth.play([(0.0, 1.0, 60), (1.0, 1.0, 64)], facts, seconds=2.0)
    second = round(60 / scores.TEMPOS["slow"] * 16000)
    assert sound.shape == (32000,) and synth.synth.program == (3, 73)
    assert set(sound[:second]) == {30.0} and set(sound[second : 2 * second]) == {32.0}, (
        "the mean of both channels"
    )


def test_books_are_opened_and_what_cannot_be_read_is_told(scores, capsys) -> None:
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
        for name, _, _ in scores.scores_in(Path(path), converter)
    ]
    assert len(names) == 41 and names[0] == "a-book-000" and names[-1] == "a-one"
    assert "left out bad.xml: KeyError" in capsys.readouterr().out


def test_what_is_silent_or_odd_is_left_out_and_names_cannot_lead_anywhere(
    tmp_path, scores, capsys
) -> None:
    given = [
        ("silent", Path("corpus/bach/x.mxl"), score()),
        ("odd", Path("corpus/bach/x.mxl"), SimpleNamespace()),
    ]
    assert scores.lay_out(iter(given), played, tmp_path / "deep/out", 10, 1.0) == 0
    said = capsys.readouterr().out
    assert "left out silent: nothing is heard" in said and "left out odd: AttributeError" in said
    assert scores.plain("../../etc/passwd") == "etc-passwd" and scores.plain("???") == "unnamed"


def test_every_collection_comes_early(scores) -> None:
    paths = [Path(f"corpus/bach/{n}.mxl") for n in range(90)] + [
        Path(f"corpus/haydn/{n}.mxl") for n in range(10)
    ]
    first = scores.chosen(paths, 20)
    assert len(first) == 20 and sum("haydn" in str(path) for path in first) == 2
    assert scores.chosen(paths[::-1], 20) == first and len(scores.chosen(paths, 1000)) == 100


def test_without_music21_a_sentence_says_so(tmp_path, scores, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "music21", None)
    monkeypatch.setattr(sys, "argv", ["scores.py", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="rendered with music21, which is not installed"):
        scores.main()
    assert not (tmp_path / "out").exists()

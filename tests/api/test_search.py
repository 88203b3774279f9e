"""Index and search: a clip finds itself, a text finds what it is about, and an index stands by
itself."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.api.search import Index, Search, as_table, by_faiss, exactly, build_index, search_index
from tessera.engine.ema import EMAConfig
from tessera.modalities.audio.media import Audio
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.music.synthetic import SyntheticMusic
from tessera.run.errors import UserError
from tests.runs import tokenizer, train_once


def trained() -> str:
    """Long enough to tell eight tunes apart."""
    run = music_mulan("tiny")
    engine = dataclasses.replace(
        run.engine, steps=60, batch_size=8, ema=EMAConfig(decay=0.9), log_every=60
    )
    engine = dataclasses.replace(engine, validate_every=60, sample_every=60, checkpoint_every=60)
    data = dataclasses.replace(run.data, seconds=1.0, num_synthetic=8, val_fraction=0.0)
    task = dataclasses.replace(run.task, optimizer=dataclasses.replace(run.task.optimizer, lr=4e-3))
    return train_once("mulan", dataclasses.replace(run, engine=engine, data=data, task=task))


@pytest.fixture(scope="module")
def run() -> str:
    return trained()


@pytest.fixture(scope="module")
def music(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tunes that were learnt from, as files, of which only some have a caption; and one that is
    none."""
    folder = tmp_path_factory.mktemp("music")
    num_synthetic = SyntheticMusic(8, samples=8000, rate_hz=8000)
    for number in range(8):
        example = num_synthetic.item(number, np.random.default_rng(0))
        Audio(example.samples, 8000).write(folder / f"{number}.wav")
        if number % 2:
            (folder / f"{number}.txt").write_text(num_synthetic.caption(number))
    (folder / "broken.wav").write_bytes(b"RIFF")
    return folder


@pytest.fixture(scope="module")
def place(run: str, music: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("indexes") / "found"
    told = build_index(run, str(music), str(place))
    assert "Left out broken.wav" in told[0] and told[-1].startswith("8 examples of")
    return place


@pytest.mark.parametrize("number", range(8))
def test_a_clip_finds_itself_by_its_own_sound(place: Path, music: Path, number: int) -> None:
    best, second, *_ = Index.load(place).search(music / f"{number}.wav")
    assert (
        best.name == f"{number}.wav"
        and best.nearness == pytest.approx(1, abs=1e-5)
        and second.nearness < 0.999
    )


def test_texts_find_what_they_are_about(place: Path) -> None:
    num_synthetic, index = SyntheticMusic(8, samples=8000, rate_hz=8000), Index.load(place)
    found = [
        index.search(num_synthetic.caption(number), top=1)[0].name == f"{number}.wav"
        for number in range(8)
    ]
    assert sum(found) >= 7


def test_an_index_stands_by_itself(place: Path, run: str, music: Path, tmp_path: Path) -> None:
    """It may be moved, and neither the run nor the music needs to be there."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(place, moved)
    config = json.loads((moved / "model/config.json").read_text())
    assert config["recipe"] == "music-mulan"
    assert Index.load(moved).search("a harp", top=3) == Index.load(place).search("a harp", top=3)
    suffixes = {file.suffix for file in moved.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_answers_are_a_table_or_json(place: Path) -> None:
    lines = search_index(str(place), "a loud bell", top=3).splitlines()
    assert len(lines) == 3 and lines[0].split()[0] == "1" and ".wav" in lines[0]
    told = json.loads(search_index(str(place), "a loud bell", top=3, as_json_text=True))
    assert (
        told["query"] == "a loud bell"
        and told["of"] == 8
        and [hit["rank"] for hit in told["hits"]] == [1, 2, 3]
    )
    assert as_table(Index.load(place).search("a loud bell", top=3)) == lines


def test_more_than_there_is_cannot_be_found(place: Path) -> None:
    hits = Index.load(place).search("anything", top=100)
    assert len(hits) == 8 and [hit.nearness for hit in hits] == sorted(
        (hit.nearness for hit in hits), reverse=True
    )


def test_without_a_folder_the_runs_own_examples_are_searched(run: str) -> None:
    index = Search.load(run).index()
    assert index.names == [f"toy-{number:06d}" for number in range(8)] and all(index.captions)


def test_faiss_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, query = torch.nn.functional.normalize(torch.randn(50, 8), dim=-1), torch.randn(1, 8)

    class Flat:
        """Stands in for faiss, which is not among what `make` installs."""

        def __init__(self, dim: int):
            assert dim == 8

        def add(self, rows: np.ndarray) -> None:
            self.rows = rows

        def search(self, queries: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
            scores = queries @ self.rows.T
            places = np.argsort(-scores, axis=1)[:, :top]
            return np.take_along_axis(scores, places, 1), places

    monkeypatch.setitem(sys.modules, "faiss", type(sys)("faiss"))
    sys.modules["faiss"].IndexFlatIP = Flat
    nearness, places = by_faiss(embeddings, query, 5)
    exact_nearness, exact_places = exactly(embeddings, query, 5)
    assert places.tolist() == exact_places.tolist() and torch.allclose(nearness, exact_nearness)


# ---- what is refused


def test_without_faiss_a_sentence_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match="pip install faiss-cpu, or search without it"):
        Index.load(place).search("a bell", how="faiss")


def test_a_place_that_is_taken_is_left_alone(run: str, place: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in place.rglob("*")}
    with pytest.raises(UserError, match="is there already, and not empty"):
        build_index(run, None, str(place))
    assert {file: file.stat().st_mtime_ns for file in place.rglob("*")} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        build_index(run, None, str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("ruin", "says"),
    [
        (lambda place: (place / "index.json").unlink(), "There is no index in"),
        (lambda place: (place / "index.json").write_text("{"), "is damaged"),
        (lambda place: (place / "index.json").write_text("[]"), "is damaged"),
        (lambda place: (place / "embeddings.safetensors").write_bytes(b"x" * 20), "is damaged"),
        (lambda place: shorten(place / "index.json"), "has 7 names and 8 embeddings"),
        (lambda place: shutil.rmtree(place / "model"), "no run"),
    ],
)
def test_a_damaged_index_is_refused(place: Path, tmp_path: Path, ruin, says: str) -> None:
    shutil.copytree(place, tmp_path / "copy")
    ruin(tmp_path / "copy")
    with pytest.raises(UserError, match=says):
        Index.load(tmp_path / "copy")


def shorten(file: Path) -> None:
    told = json.loads(file.read_text())
    told["names"].pop()
    told["captions"].pop()
    file.write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("query", "top", "says"), [("  ", 3, "query is empty"), ("a bell", 0, "top is 0")]
)
def test_questions_without_an_answer_are_refused(
    place: Path, query: str, top: int, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        Index.load(place).search(query, top)


def test_a_file_that_cannot_be_heard_is_refused_with_the_reason(place: Path, music: Path) -> None:
    with pytest.raises(UserError, match="cannot be searched by .*broken.wav"):
        Index.load(place).search(music / "broken.wav")


def test_a_run_that_knows_no_texts_is_refused() -> None:
    with pytest.raises(UserError, match="search with a run of music-mulan"):
        Search.load(tokenizer())

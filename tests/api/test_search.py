"""Tests of `Search` and `Index`: audio finds itself, and captions find audio."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.api.search import (
    Index,
    Search,
    build_index,
    search_exactly,
    search_index,
    search_with_faiss,
)
from tessera.engine.ema import EMAConfig
from tessera.modalities.audio.media import Audio
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.music.synthetic import SyntheticMusic
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera
from tests.runs import tokenizer, train_once


@pytest.fixture(scope="module")
def run() -> str:
    """Return a run that was trained until it distinguishes eight tunes."""
    run = music_mulan("tiny")
    engine = dataclasses.replace(
        run.engine,
        steps=60,
        batch_size=8,
        ema=EMAConfig(decay=0.9),
        log_every=60,
        validate_every=60,
        sample_every=60,
        checkpoint_every=60,
    )
    data = dataclasses.replace(run.data, seconds=1.0, num_synthetic=8, val_fraction=0.0)
    task = dataclasses.replace(run.task, optimizer=dataclasses.replace(run.task.optimizer, lr=4e-3))
    return train_once("mulan", dataclasses.replace(run, engine=engine, data=data, task=task))


@pytest.fixture(scope="module")
def tunes() -> SyntheticMusic:
    return SyntheticMusic(8, samples=8000, rate_hz=8000)


@pytest.fixture(scope="module")
def music(tunes: SyntheticMusic, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the training set as files, every second one with a caption, and one broken file."""
    folder = tmp_path_factory.mktemp("music")
    for number in range(8):
        example = tunes.item(number, np.random.default_rng(0))
        Audio(example.samples, 8000).write(folder / f"{number}.wav")
        if number % 2:
            (folder / f"{number}.txt").write_text(tunes.caption(number))
    (folder / "broken.wav").write_bytes(b"RIFF")
    return folder


@pytest.fixture(scope="module")
def folder(run: str, music: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an index."""
    folder = tmp_path_factory.mktemp("indexes") / "index"
    notices = build_index(run, str(music), str(folder))
    assert "Skipped broken.wav:" in notices[0] and notices[-1].startswith("8 examples of")
    return folder


# ---- results


@pytest.mark.parametrize("number", range(8))
def test_audio_finds_itself(folder: Path, music: Path, number: int) -> None:
    best, second, *_ = Index.load(folder).search(music / f"{number}.wav")
    assert best.name == f"{number}.wav" and best.similarity == pytest.approx(1, abs=1e-5)
    assert second.similarity < 0.999


def test_a_text_may_be_longer_than_a_path(folder: Path) -> None:
    assert Index.load(folder).search("a slow harp " * 60)


def test_captions_find_their_audio(folder: Path, tunes: SyntheticMusic) -> None:
    index = Index.load(folder)
    best = [index.search(tunes.caption(number), top=1)[0].name for number in range(8)]
    assert sum(name == f"{number}.wav" for number, name in enumerate(best)) >= 7


def test_index_can_be_moved_and_needs_no_other_file(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    config = json.loads((moved / "model/config.json").read_text())
    assert config["recipe"] == "music-mulan"
    assert Index.load(moved).search("a harp", top=3) == Index.load(folder).search("a harp", top=3)
    suffixes = {file.suffix for file in moved.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_results_are_a_table_or_json(folder: Path) -> None:
    hits = Index.load(folder).search("a loud bell", top=3)
    lines = search_index(str(folder), "a loud bell", top=3).splitlines()
    assert lines[0].split()[0] == "1"
    for line, hit in zip(lines[:3], hits, strict=True):
        assert hit.name in line and f"{hit.similarity:6.3f}" in line and hit.caption in line
    content = json.loads(search_index(str(folder), "a loud bell", top=3, as_json=True))
    assert content["query"] == "a loud bell" and content["examples"] == 8
    assert content["hits"] == [dataclasses.asdict(hit) for hit in hits]
    assert [hit.rank for hit in hits] == [1, 2, 3]


def test_texts_that_describe_nothing_in_the_index_are_reported(
    folder: Path, run: str, tunes: SyntheticMusic
) -> None:
    index = Index.load(folder)
    for number in range(8):
        hits = index.search(tunes.caption(number), top=1)
        assert hits[0].better_than >= 0.75 and not index.explain_distance("words", hits)
    # An index of one tune, searched for the tunes that are not in it.
    [only] = [i for i, name in enumerate(index.names) if name == "3.wav"]
    alone = dataclasses.replace(
        index,
        names=["3.wav"],
        captions=[""],
        embeddings_ND=index.embeddings_ND[[only]],
    )
    others = [tunes.caption(number) for number in range(8) if number != 3]
    notices = [alone.explain_distance(text, alone.search(text)) for text in others]
    assert sum("Nothing is near" in notice for notice in notices) >= 5
    assert not alone.explain_distance("", alone.search(tunes.caption(3)))


def test_recordings_that_resemble_nothing_are_reported(folder: Path, music: Path) -> None:
    index = Index.load(folder)
    path = music / "2.wav"
    assert not index.explain_distance(path, index.search(path))
    assert index.background.nearest is not None and index.background.nearest < 1
    others = [i for i, name in enumerate(index.names) if name != "2.wav"]
    names = [index.names[i] for i in others]
    without = dataclasses.replace(
        index,
        names=names,
        captions=[""] * len(names),
        embeddings_ND=index.embeddings_ND[others],
        background=dataclasses.replace(index.background, nearest=0.999),
    )
    assert "Nothing is near" in without.explain_distance(path, without.search(path))


@pytest.mark.parametrize("query", ["nofile.wav", "./music", "folder/song.MP3"])
def test_mistyped_path_is_no_text(query: str, folder: Path) -> None:
    message = run_invalid("search", folder, query)
    assert f"{query} does not exist: give the path of a recording" in message


def test_results_are_sorted_and_at_most_all_examples(folder: Path) -> None:
    similarities = [hit.similarity for hit in Index.load(folder).search("anything", top=100)]
    assert len(similarities) == 8 and similarities == sorted(similarities, reverse=True)


def test_data_of_the_run_are_indexed_by_default(run: str) -> None:
    index = Search.load(run).index()
    assert index.names == [f"synthetic-{number:06d}" for number in range(8)]
    assert all(index.captions) and index.skipped == []


def test_commands_build_and_search_an_index(run: str, music: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    result = tessera("index", run, "--data", music, "--out", out)
    assert result.code == 0 and "Skipped broken.wav:" in result.err, result
    result = tessera("search", out, str(music / "3.wav"), "--top", "2", "--json")
    assert result.code == 0 and json.loads(result.out)["hits"][0]["name"] == "3.wav"
    result = tessera("search", out, "a loud bell", "--top", "2")
    assert result.code == 0 and len(result.out.splitlines()) == 2


def test_faiss_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, query = torch.nn.functional.normalize(torch.randn(50, 8), dim=-1), torch.randn(1, 8)

    class IndexFlatIP:
        """Replace faiss, which `make` does not install."""

        def __init__(self, dim: int):
            assert dim == 8

        def add(self, rows: np.ndarray) -> None:
            self.rows = rows

        def search(self, queries: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
            scores = queries @ self.rows.T
            indices = np.argsort(-scores, axis=1)[:, :top]
            return np.take_along_axis(scores, indices, 1), indices

    module = type(sys)("faiss")
    module.IndexFlatIP = IndexFlatIP  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "faiss", module)
    similarities, indices = search_with_faiss(embeddings, query, 5)
    expected_similarities, expected_indices = search_exactly(embeddings, query, 5)
    assert indices.tolist() == expected_indices.tolist()
    assert torch.allclose(similarities, expected_similarities)


# ---- errors


def test_missing_faiss_is_an_error_with_both_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match=r'pip install "tessera\[search\]", or use --how exact'):
        Index.load(folder).search("a bell", how="faiss")


def test_output_folder_in_use_is_left_unchanged(run: str, folder: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    with pytest.raises(UserError, match="exists and is not empty"):
        build_index(run, None, str(folder))
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="exists and is not empty"):
        build_index(run, None, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def remove_last_name(folder: Path) -> None:
    file = folder / "index.json"
    content = json.loads(file.read_text())
    content["names"].pop()
    content["captions"].pop()
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "index.json").unlink(), "There is no index in"),
        (lambda folder: (folder / "index.json").write_text("{"), "is corrupt"),
        (lambda folder: (folder / "index.json").write_text("[]"), "is corrupt"),
        (lambda folder: (folder / "embeddings.safetensors").write_bytes(b"x" * 20), "is corrupt"),
        (remove_last_name, "has 7 names and 8 embeddings"),
        (lambda folder: shutil.rmtree(folder / "model"), "There is no run in"),
    ],
)
def test_damaged_index_is_rejected(
    folder: Path, tmp_path: Path, damage: Callable[[Path], object], expected: str
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(UserError, match=expected):
        Index.load(tmp_path / "copy")


@pytest.mark.parametrize(
    ("query", "top", "expected"),
    [("  ", 3, "The query is empty"), ("a bell", 0, "--top must be at least 1, got 0")],
)
def test_invalid_queries_are_rejected(folder: Path, query: str, top: int, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        Index.load(folder).search(query, top)
    assert expected in run_invalid("search", folder, query, "--top", str(top))


def test_unreadable_query_is_rejected_with_the_reason(folder: Path, music: Path) -> None:
    with pytest.raises(UserError, match="The query cannot be read: .*broken.wav"):
        Index.load(folder).search(music / "broken.wav")


def test_run_without_a_joint_embedding_is_rejected() -> None:
    with pytest.raises(UserError, match="trains no joint embedding: give a run of music-mulan"):
        Search.load(tokenizer())

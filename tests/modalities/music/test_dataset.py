"""Tests of music with captions: several captions, tags, and examples without a caption."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.data.dataset import Split
from tessera.engine.task import Batch
from tessera.losses.contrastive import negative_mask
from tessera.modalities.audio.media import Audio
from tessera.modalities.music.dataset import MusicDataConfig, MusicFolderDataset
from tessera.modalities.music.media import MusicExample
from tessera.objectives.contrastive import caption_ids_of
from tessera.run.errors import UserError

MUSIC = MusicDataConfig(rate_hz=8000, seconds=0.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    time = np.arange(8000, dtype=np.float32) / 8000
    for number, name in enumerate(("a", "b", "c", "d")):
        tone = np.sin(2 * np.pi * 220 * (number + 1) * time) / 2
        Audio(tone[None], 8000).write(tmp_path / f"{name}.wav")
    return tmp_path


def open_folder(folder: Path, **settings: Any) -> MusicFolderDataset:
    dataset = dataclasses.replace(MUSIC, path=str(folder), **settings).full()
    assert isinstance(dataset, MusicFolderDataset)
    return dataset


def build_split(folder: Path, **settings: Any) -> Split:
    return dataclasses.replace(MUSIC, path=str(folder), **settings).build()


def load(dataset: MusicFolderDataset, index: int, seed: int = 0) -> MusicExample:
    return dataset.item(index, np.random.default_rng(seed))


def drawn_captions(folder: Path, index: int, **settings: Any) -> set[str]:
    dataset = open_folder(folder, **settings)
    return {load(dataset, index, seed).caption for seed in range(40)}


def write_metadata(folder: Path, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metadata.jsonl").write_text(text)


def test_each_line_of_a_text_file_is_a_caption(folder: Path) -> None:
    (folder / "a.txt").write_text("a low tone\n\n a  quiet hum \n")
    assert drawn_captions(folder, 0) == {"a low tone", "a quiet hum"}
    dataset = open_folder(folder)
    assert dataset.all_captions(0) == ["a low tone", "a quiet hum"]
    assert dataset.caption(0) == "a low tone"
    whole = open_folder(folder, lines=False)
    assert whole.all_captions(0) == ["a low tone a quiet hum"]
    assert drawn_captions(folder, 0, lines=False) == {"a low tone a quiet hum"}


def test_metadata_can_have_several_captions_and_tags(folder: Path) -> None:
    write_metadata(
        folder,
        {"file_name": "a.wav", "text": ["low", "deep"], "tags": ["piano", "slow"]},
        {"file_name": "b.wav", "tags": ["harp", "fast", "harp", " "]},
        {"file_name": "c.wav", "text": "middle"},
    )
    assert drawn_captions(folder, 0) == {"low", "deep"}
    assert drawn_captions(folder, 1) == {"harp, fast", "with harp and fast", "with fast and harp"}
    assert drawn_captions(folder, 2) == {"middle"}
    dataset = open_folder(folder)
    examples = [load(dataset, i) for i in range(3)]
    assert [example.tags for example in examples] == [("piano", "slow"), ("harp", "fast"), ()]
    batch = dataset.collate(examples)
    assert batch.tags[1] == ("harp", "fast") and batch.to("cpu").tags == batch.tags
    assert batch.samples.shape == (3, 1, 4000)


def test_csv_can_have_lists_as_json(folder: Path) -> None:
    (folder / "metadata.csv").write_text(
        'file_name,text,tags\na.wav,"[""low"", ""deep""]",\nb.wav,,"harp, fast"\n'
    )
    assert drawn_captions(folder, 0) == {"low", "deep"}
    assert "harp, fast" in drawn_captions(folder, 1)


def test_audio_does_not_depend_on_the_number_of_captions(folder: Path) -> None:
    (folder / "a.txt").write_text("one\ntwo")
    several = [load(open_folder(folder, crop="random"), 0, seed=3) for _ in range(2)]
    (folder / "a.txt").write_text("one")
    single = load(open_folder(folder, crop="random"), 0, seed=3)
    assert np.array_equal(several[0].samples, single.samples)
    assert several[0].caption == several[1].caption


# ---- negatives of the contrastive loss


def make_batch(dataset: MusicFolderDataset, examples: list[MusicExample]) -> Batch[Any]:
    return Batch(dataset.collate(examples), [str(i) for i in range(len(examples))], [0] * 4)


def test_equal_caption_files_are_not_negatives_for_different_lines(folder: Path) -> None:
    (folder / "a.txt").write_text("slow piano\na quiet evening")
    (folder / "b.txt").write_text("A quiet  evening\nslow piano\n")
    (folder / "c.txt").write_text("fast drums")
    (folder / "d.txt").write_text("slow piano\nfast drums")
    dataset = open_folder(folder)
    first = next(one for one in (load(dataset, 0, s) for s in range(20)) if "slow" in one.caption)
    second = next(one for one in (load(dataset, 1, s) for s in range(20)) if "quiet" in one.caption)
    third = load(dataset, 2)
    fourth = next(one for one in (load(dataset, 3, s) for s in range(20)) if "fast" in one.caption)
    batch = make_batch(dataset, [first, second, third, fourth])
    assert batch.examples.captions == ["slow piano", "A quiet evening", "fast drums", "fast drums"]
    negatives = negative_mask(caption_ids_of(batch))
    assert negatives.tolist() == [
        [False, False, True, True],
        [False, False, True, True],
        [True, True, False, False],
        [True, True, False, False],
    ]


def test_equal_tags_are_not_negatives_for_different_phrases(folder: Path) -> None:
    write_metadata(
        folder,
        {"file_name": "a.wav", "tags": ["harp", "fast"]},
        {"file_name": "b.wav", "tags": ["harp", "fast"]},
        {"file_name": "c.wav", "tags": ["harp", "slow"]},
    )
    dataset = open_folder(folder)
    by_caption = {load(dataset, 0, seed).caption: load(dataset, 0, seed) for seed in range(40)}
    second = load(dataset, 1)
    first = next(one for caption, one in by_caption.items() if caption != second.caption)
    batch = make_batch(dataset, [first, second, load(dataset, 2)])
    negatives = negative_mask(caption_ids_of(batch))
    assert negatives.tolist() == [[False, False, True], [False, False, True], [True, True, False]]


# ---- music in memory


def test_music_in_memory_is_preprocessed_like_its_file(folder: Path) -> None:
    config = dataclasses.replace(MUSIC, path="unused", loudness_db=-20.0)
    expected = config.example_from_file(str(folder / "b.wav"))
    audio = Audio.load(folder / "b.wav")
    for media in (audio, audio.samples, audio.samples[0]):
        example = config.example_from_media(media)
        assert isinstance(example, MusicExample) and (example.caption, example.tags) == ("", ())
        assert np.array_equal(example.samples, expected.samples) and example.length == 8000


def test_music_of_different_lengths_in_memory_is_padded() -> None:
    examples = [MUSIC.example_from_media(np.full(n, 0.5, np.float32)) for n in (300, 500)]
    batch = MUSIC.collate(examples)
    assert batch.samples.shape == (2, 1, 500) and batch.lengths.tolist() == [300, 500]
    assert batch.tags == [(), ()] and batch.caption_sets == [("",), ("",)]


def test_other_types_than_audio_and_arrays_are_rejected() -> None:
    with pytest.raises(UserError, match=r"Expected an Audio, a path or an array .*, got a dict\."):
        MUSIC.example_from_media({})


# ---- missing and invalid captions


def test_examples_without_captions_are_left_out_and_counted(folder: Path) -> None:
    for name in ("a", "b", "d"):
        (folder / f"{name}.txt").write_text(f"this is {name}")
    split = build_split(folder, val_fraction=0.0)
    assert [split.train.name(i) for i in range(3)] == ["a.wav", "b.wav", "d.wav"]
    assert len(split.train) == 3
    assert split.train.num_without_caption == 1
    assert len(open_folder(folder)) == 4, "for search they are kept"
    assert load(open_folder(folder), 2).caption == ""


def test_empty_captions_do_not_count(folder: Path) -> None:
    write_metadata(
        folder,
        {"file_name": "a.wav", "text": ""},
        {"file_name": "b.wav", "text": ["  "]},
        {"file_name": "c.wav", "tags": []},
    )
    with pytest.raises(UserError, match=r"has 4 audio file\(s\), 0 of them with a caption"):
        build_split(folder)


def test_single_pair_is_rejected(folder: Path) -> None:
    (folder / "a.txt").write_text("the only one")
    message = "1 of them with a caption, but training needs 2 or more: put name.txt"
    with pytest.raises(UserError, match=message):
        build_split(folder)


def test_captions_of_missing_files_only_are_rejected(folder: Path) -> None:
    write_metadata(folder, {"file_name": "lost.wav", "text": "gone"})
    with pytest.raises(UserError, match="names 1 files, none of which exists"):
        build_split(folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"file_name": "a.wav", "text": [1]}, "must be a text or a list of texts"),
        ({"file_name": "a.wav", "tags": {"a": 1}}, "tags must be a list of words"),
    ],
)
def test_captions_of_other_types_are_rejected(folder: Path, line: Any, message: str) -> None:
    write_metadata(folder, line)
    with pytest.raises(UserError, match=message):
        build_split(folder)

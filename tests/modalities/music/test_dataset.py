"""Music with what is said about it: several captions, tags, and what is done with clips of which
nothing is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tessera.modalities.audio.media import Audio
from tessera.modalities.music.dataset import MusicDataConfig
from tessera.run.errors import UserError

MUSIC = MusicDataConfig(rate_hz=8000, seconds=0.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("a", "b", "c", "d")):
        time = np.arange(8000, dtype=np.float32) / 8000
        Audio((np.sin(2 * np.pi * 220 * (number + 1) * time) / 2)[None], 8000).write(
            tmp_path / f"{name}.wav"
        )
    return tmp_path


def source(folder: Path, **settings):
    import dataclasses

    return dataclasses.replace(MUSIC, path=str(folder), **settings).full()


def said(folder: Path, index: int, **settings) -> set[str]:
    data = source(folder, **settings)
    return {data.item(index, np.random.default_rng(seed)).caption for seed in range(40)}


def test_each_line_of_a_text_file_is_a_caption(folder: Path) -> None:
    (folder / "a.txt").write_text("a low tone\n\n a  quiet hum \n")
    assert said(folder, 0) == {"a low tone", "a quiet hum"}
    assert (
        source(folder).all_captions(0) == ["a low tone", "a quiet hum"]
        and source(folder).caption(0) == "a low tone a quiet hum"
    )
    assert said(folder, 0, lines=False) == {"a low tone a quiet hum"}


def test_metadata_may_hold_several_captions_and_tags(folder: Path) -> None:
    lines = [
        {"file_name": "a.wav", "text": ["low", "deep"], "tags": ["piano", "slow"]},
        {"file_name": "b.wav", "tags": ["harp", "fast", "harp", " "]},
        {"file_name": "c.wav", "text": "middle"},
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert said(folder, 0) == {"low", "deep"}
    assert said(folder, 1) == {"harp, fast", "with harp and fast", "with fast and harp"}
    assert said(folder, 2) == {"middle"}
    data = source(folder)
    assert [data.item(i, np.random.default_rng(0)).tags for i in range(3)] == [
        ("piano", "slow"),
        ("harp", "fast"),
        (),
    ]
    batch = data.collate([data.item(i, np.random.default_rng(0)) for i in range(3)])
    assert (
        batch.tags[1] == ("harp", "fast")
        and batch.samples.shape == (3, 1, 4000)
        and batch.to("cpu").tags == batch.tags
    )


def test_csv_says_the_same_with_lists_as_json_writes_them(folder: Path) -> None:
    (folder / "metadata.csv").write_text(
        'file_name,text,tags\na.wav,"[""low"", ""deep""]",\nb.wav,,"harp, fast"\n'
    )
    assert said(folder, 0) == {"low", "deep"} and "harp, fast" in said(folder, 1)


def test_a_clip_is_heard_the_same_whatever_is_said_about_it(folder: Path) -> None:
    (folder / "a.txt").write_text("one\ntwo")
    clips = [source(folder, crop="random").item(0, np.random.default_rng(3)) for _ in range(2)]
    (folder / "a.txt").write_text("one")
    alone = source(folder, crop="random").item(0, np.random.default_rng(3))
    assert np.array_equal(clips[0].samples, alone.samples) and clips[0].caption == clips[1].caption


# ---- bad input


def test_clips_without_captions_are_not_learnt_from_and_counted(folder: Path) -> None:
    for name in ("a", "b", "d"):
        (folder / f"{name}.txt").write_text(f"this is {name}")
    import dataclasses

    split = dataclasses.replace(MUSIC, path=str(folder), val_fraction=0.0).build()
    assert split.train.names == ["a.wav", "b.wav", "d.wav"] and split.train.without_caption == 1
    assert len(source(folder)) == 4, "to search in they are as good as the others"
    assert source(folder).item(2, np.random.default_rng(0)).caption == ""


def test_captions_of_nothing_are_no_captions(folder: Path) -> None:
    lines = [
        {"file_name": "a.wav", "text": ""},
        {"file_name": "b.wav", "text": ["  "]},
        {"file_name": "c.wav", "tags": []},
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="Of 4 recording.s. in .* 0 has a caption"):
        source_for_training(folder)


def source_for_training(folder: Path):
    import dataclasses

    return dataclasses.replace(MUSIC, path=str(folder)).build()


def test_one_pair_alone_is_refused(folder: Path) -> None:
    (folder / "a.txt").write_text("the only one")
    with pytest.raises(
        UserError, match="1 has a caption, and what belongs to what can be learnt from 2 or more"
    ):
        source_for_training(folder)


def test_captions_without_clips_are_told(folder: Path) -> None:
    (folder / "metadata.jsonl").write_text('{"file_name": "lost.wav", "text": "gone"}\n')
    with pytest.raises(UserError, match="names 1 files, of which none is there"):
        source_for_training(folder)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"file_name": "a.wav", "text": [1]}', "must be a text, or a list of texts"),
        ('{"file_name": "a.wav", "tags": {"a": 1}}', "tags must be a list of words"),
    ],
)
def test_captions_that_are_no_texts_are_refused(folder: Path, line: str, says: str) -> None:
    (folder / "metadata.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=says):
        source_for_training(folder)

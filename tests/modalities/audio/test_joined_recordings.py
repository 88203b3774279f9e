"""Two recordings of a speaker as one example."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.data.tokens import TokenDataset
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.joined_recordings import JoinedRecordings
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.soundstorm import SoundStormTaskConfig
from tessera.run.errors import UserError

NAMES = ["ann/0.wav", "ann/1.wav", "ann/2.wav", "bob/0.wav"]
FRAMES = [4, 3, 1, 4]
"""Frames of the codec, each of 20 samples; a semantic token has 40."""


@pytest.fixture
def dataset() -> TokenDataset:
    acoustic = torch.full((4, 4, 2), -1)
    semantic = torch.full((4, 2), -1)
    for row, frames in enumerate(FRAMES):
        acoustic[row, :frames] = torch.arange(frames)[:, None] + 10 * row
        semantic[row, : -(-frames // 2)] = torch.arange(-(-frames // 2)) + 10 * row
    return TokenDataset(NAMES, {"tokenizer": acoustic, "semantic": semantic}, [""] * 4)


@pytest.fixture
def joined(dataset: TokenDataset) -> JoinedRecordings:
    speakers = {name: name.split("/")[0] for name in NAMES}
    return JoinedRecordings(dataset, {"tokenizer": 20, "semantic": 40}, speakers)


def test_another_recording_of_the_speaker_comes_first(joined: JoinedRecordings) -> None:
    first = set()
    for seed in range(30):
        item = joined.item(0, np.random.default_rng(seed))
        acoustic, semantic = item.codes["tokenizer"][:, 0].tolist(), item.codes["semantic"].tolist()
        assert acoustic[-4:] == [0, 1, 2, 3] and semantic[-2:] == [0, 1]
        first.add((tuple(acoustic[:-4]), tuple(semantic[:-2])))
    # Cut to frames that end together: recording 1 to two of its three, recording 2 to none.
    assert first == {((10, 11), (10,)), ((), ())}


def test_a_single_recording_of_a_speaker_stays_alone(joined: JoinedRecordings) -> None:
    item = joined.item(3, np.random.default_rng(0))
    assert item.codes["tokenizer"][:, 0].tolist() == [30, 31, 32, 33]


def test_a_batch_is_padded_to_its_longest_example(joined: JoinedRecordings) -> None:
    items = [joined.item(i, np.random.default_rng(5)) for i in range(4)]
    batch = joined.collate(items)
    longest = max(len(item.codes["tokenizer"]) for item in items)
    assert batch.codes["tokenizer"].shape == (4, longest, 2)
    assert (batch.codes["tokenizer"][2, len(items[2].codes["tokenizer"]) :] == -1).all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Recordings of two speakers in one folder, whose metadata name them."""
    lines = []
    for number, speaker in enumerate(("ann", "bob", "ann", "bob")):
        samples = np.sin(np.arange(800) / (5 + number))[None].astype(np.float32)
        Audio(samples, 8_000).write(tmp_path / f"{number}.wav")
        lines.append(json.dumps({"file_name": f"{number}.wav", "speaker": speaker}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    return tmp_path


def prepare(folder: Path, **settings: str) -> object:
    source = AudioDataConfig(path=str(folder), rate_hz=8_000, seconds=0.1).full()
    names = [source.name(index) for index in range(len(source))]
    tokens = TokenDataset(names, {"tokenizer": torch.zeros(4, 3, 2)}, [""] * 4)
    return SoundStormTaskConfig(**settings).prepare_dataset(tokens, {}, source)


def test_speakers_are_read_from_a_column_of_the_metadata(folder: Path) -> None:
    joined = prepare(folder, speaker_by="speaker")
    assert isinstance(joined, JoinedRecordings)
    assert joined.by_speaker == {"ann": [0, 2], "bob": [1, 3]}


def test_files_of_one_folder_have_no_known_speakers(folder: Path) -> None:
    assert isinstance(prepare(folder), TokenDataset)
    assert isinstance(prepare(folder, speaker_by="speaker", prompts="recording"), TokenDataset)


def test_an_unknown_column_of_speakers_is_an_error(folder: Path) -> None:
    with pytest.raises(UserError, match="--task.speaker-by is 'singer'.*use one of"):
        prepare(folder, speaker_by="singer")

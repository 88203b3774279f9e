"""Two recordings of a speaker as one example."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.data.tokens import TokenDataset
from tessera.modalities.audio.joined_recordings import JoinedRecordings, has_speakers

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
    return JoinedRecordings(dataset, {"tokenizer": 20, "semantic": 40})


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


def test_files_of_one_folder_have_no_known_speakers(dataset: TokenDataset) -> None:
    assert has_speakers(dataset)
    assert not has_speakers(TokenDataset(["a.wav", "b.wav"], {}, ["", ""]))

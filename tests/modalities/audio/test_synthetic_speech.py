"""Synthetic speech whose captions are transcripts."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.synthetic_speech import VOICES, SyntheticSpeech

DATASET = SyntheticSpeech(60, samples=24_000, rate_hz=8_000, seed=3)


def test_examples_depend_only_on_seed_and_number() -> None:
    rng = np.random.default_rng(0)
    later = replace(DATASET, count=5, first=20)
    one, other = DATASET.item(20, rng), later.item(0, rng)
    assert np.array_equal(one.samples, other.samples) and one.caption == other.caption
    assert DATASET.caption(20) == one.caption and DATASET.name(20) == later.name(0)
    assert not np.array_equal(replace(DATASET, seed=4).item(20, rng).samples, one.samples)


def test_captions_are_words_of_syllables() -> None:
    syllable = r"(m|s|t)?(ee|eh|ah|aw|oo)"
    for index in range(60):
        assert re.fullmatch(rf"(({syllable})+ ?)+", DATASET.caption(index))
    assert len({DATASET.caption(index) for index in range(60)}) > 55


def test_names_begin_with_the_speaker() -> None:
    folders = {DATASET.name(index).split("/")[0] for index in range(60)}
    assert len(folders) == len(VOICES)


@pytest.mark.parametrize("seconds", [0.3, 0.8, 3.0])
def test_speech_fits_the_length_and_silence_follows(seconds: float) -> None:
    dataset = replace(DATASET, samples=round(seconds * 8_000))
    for index in range(20):
        example = dataset.item(index, np.random.default_rng(0))
        assert example.samples.shape == (1, dataset.samples)
        assert 0.1 * 8_000 < example.length <= dataset.samples
        assert not example.samples[:, example.length :].any()
        assert 0.3 < np.abs(example.samples).max() <= 1


def test_longer_texts_last_longer() -> None:
    lengths = [DATASET.item(i, np.random.default_rng(0)).length for i in range(60)]
    sizes = [len(DATASET.caption(i)) for i in range(60)]
    assert np.corrcoef(lengths, sizes)[0, 1] > 0.9


def test_the_data_config_chooses_the_content() -> None:
    config = AudioDataConfig(rate_hz=8_000, seconds=1.0, num_synthetic=8)
    assert "voice" in " ".join(config.build().train.caption(i) for i in range(8))
    speech = replace(config, synthetic_content="speech").build()
    assert "voice" not in " ".join(speech.train.caption(i) for i in range(8))
    assert speech.validation.name(0) != speech.train.name(0)

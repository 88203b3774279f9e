"""PESQ where it is defined, and None elsewhere."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tessera.modalities.audio.speech_quality import pesq, pesq_available
from tessera.modalities.audio.synthetic_voices import SPEAKERS, Syllable, synthesize_speech


def make_voice(rate_hz: int) -> np.ndarray:
    syllables = (
        Syllable("m", "ah"),
        Syllable("s", "ee"),
        Syllable("", "oo"),
        Syllable("t", "eh"),
        Syllable("m", "aw"),
    )
    rng = np.random.default_rng(0)
    return synthesize_speech(SPEAKERS[1], syllables, False, 2.0, 0.35, rate_hz, rng)


@pytest.mark.parametrize("rate_hz", [8_000, 16_000])
def test_pesq_decreases_with_noise(rate_hz: int):
    original = make_voice(rate_hz)
    noise = np.random.default_rng(1).normal(size=len(original))
    scores = [pesq(original, original + level * noise, rate_hz) for level in (0.0, 0.003, 0.1)]
    assert scores[0] > 4, scores
    assert all(better > worse + 0.01 for better, worse in zip(scores, scores[1:])), scores
    assert pesq_available(rate_hz)


@pytest.mark.parametrize(
    ("samples", "rate_hz"),
    [
        (np.zeros(16_000), 16_000),
        (make_voice(16_000)[:3999], 16_000),
        (make_voice(24_000), 24_000),
        (np.zeros(1), 8_000),
    ],
    ids=["silence", "too short", "other rate", "one sample"],
)
def test_pesq_is_none_where_it_is_undefined(samples: np.ndarray, rate_hz: int):
    assert pesq(samples, samples, rate_hz) is None


def test_without_the_package_pesq_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pesq", None)
    voice = make_voice(16_000)
    assert not pesq_available(16_000) and pesq(voice, voice, 16_000) is None

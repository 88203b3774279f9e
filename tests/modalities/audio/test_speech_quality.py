"""PESQ where it can be had, and None where nothing can be said."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tessera.modalities.audio.speech_quality import can_be_measured, pesq
from tessera.modalities.audio.synthetic_voices import SPEAKERS, Syllable, spoken


def voice(rate_hz: int) -> np.ndarray:
    words = (
        Syllable("m", "ah"),
        Syllable("s", "ee"),
        Syllable("", "oo"),
        Syllable("t", "eh"),
        Syllable("m", "aw"),
    )
    return spoken(SPEAKERS[1], words, False, 2.0, 0.35, rate_hz, np.random.default_rng(0))


@pytest.mark.parametrize("rate_hz", [8_000, 16_000])
def test_it_falls_with_noise(rate_hz: int):
    original, noise = voice(rate_hz), np.random.default_rng(1).normal(size=len(voice(rate_hz)))
    scores = [pesq(original, original + level * noise, rate_hz) for level in (0.0, 0.003, 0.1)]
    assert scores[0] > 4 and all(
        better > worse + 0.01 for better, worse in zip(scores, scores[1:])
    ), scores
    assert can_be_measured(rate_hz)


@pytest.mark.parametrize(
    ("sound", "rate_hz"),
    [
        (np.zeros(16_000), 16_000),
        (voice(16_000)[:3999], 16_000),
        (voice(24_000), 24_000),
        (np.zeros(1), 8_000),
    ],
)
def test_where_nothing_can_be_said_it_is_none(sound: np.ndarray, rate_hz: int):
    assert pesq(sound, sound, rate_hz) is None


def test_without_the_package_nothing_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "pesq", None)
    assert not can_be_measured(16_000) and pesq(voice(16_000), voice(16_000), 16_000) is None

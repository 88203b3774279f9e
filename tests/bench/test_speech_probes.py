"""bench/speech_probes.py and the pitch detector: known tokens and tones."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from tessera.metrics.text import edit_distance

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def probes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("speech_probes")


def make_recordings(probes, *, content: bool, speaker: bool):
    """Four speakers say twelve sentences; tokens depend on the sentence, the speaker, or both."""
    rng = np.random.default_rng(0)
    sentences = rng.integers(20, size=(12, 30))
    recordings = []
    for who in range(4):
        for number, tokens in enumerate(sentences):
            said = tokens if content else rng.integers(20, size=30)
            own = said + (20 * who if speaker else 0)
            recordings.append(probes.Recording(f"speaker {who}", f"sentence {number}", own))
    return recordings


def test_edit_distances_of_many_candidates_equal_those_of_pairs(probes):
    rng = np.random.default_rng(1)
    query, *candidates = (rng.integers(4, size=rng.integers(1, 12)) for _ in range(20))
    found = probes.edit_distances(query, candidates)
    for distance, one in zip(found, candidates, strict=True):
        expected = edit_distance(query.tolist(), one.tolist()) / max(len(query), len(one))
        assert distance == pytest.approx(expected)


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize("speaker", [True, False])
def test_probes_find_what_tokens_contain(probes, content, speaker):
    recordings = make_recordings(probes, content=content, speaker=speaker)
    accuracy = probes.speaker_accuracy(recordings, vocab_size=100)
    assert accuracy == 1 if speaker else accuracy < 0.5
    if not speaker:
        retrieval = probes.content_retrieval(recordings)
        assert retrieval == 1 if content else retrieval < 0.3


def test_pitch_of_a_tone_with_harmonics_is_its_fundamental(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    metrics = importlib.import_module("speech_metrics")
    time = np.arange(16_000) / 16_000
    for hertz in (80.0, 150.0, 330.0):
        tone = sum(np.sin(2 * np.pi * hertz * k * time) / k for k in range(1, 6))
        assert metrics.median_pitch_hz(tone, 16_000) == pytest.approx(hertz, rel=0.02)
    assert np.isnan(metrics.median_pitch_hz(np.zeros(16_000), 16_000))

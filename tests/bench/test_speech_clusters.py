"""bench/speech_clusters.py on frames whose clusters and speakers are known."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    for name in ("speech_clusters", "speech_probes"):
        sys.modules.pop(name, None)
    return importlib.import_module("speech_clusters")


def build_recordings(clusters: Any) -> list[Any]:
    """Two speakers say sequences of four sounds; one of them is shifted in one direction."""
    generator = torch.Generator().manual_seed(0)
    sounds_KD = 4 * torch.eye(4, 6)
    recordings = []
    for sentence in range(12):
        codes_T = torch.randint(4, (40,), generator=generator)
        for speaker in ("a", "b"):
            mel_TD = sounds_KD[codes_T] + 0.1 * torch.randn(40, 6, generator=generator)
            mel_TD[:, 5] += 3.0 * (speaker == "b")
            recordings.append(clusters.Spoken(speaker, str(sentence), {"mel": mel_TD}, codes_T))
    return recordings


def test_clusters_of_separate_sounds_explain_them(clusters: Any) -> None:
    recordings = build_recordings(clusters)
    codes = [one.codes_T for one in recordings]
    sounds = [
        clusters.Spoken(one.speaker, one.sentence, {"mel": one.layers["mel"][:, :4]}, one.codes_T)
        for one in recordings
    ]
    assert clusters.explained_variance(sounds, codes, 4) > 0.8
    wrong = [one.flip(0) for one in codes]
    assert clusters.explained_variance(sounds, wrong, 4) < 0.2


def test_the_direction_of_speakers_is_removed(clusters: Any) -> None:
    recordings = build_recordings(clusters)
    project = clusters.without_speakers(recordings, "mel", directions=1)
    means = {
        name: torch.cat([project(one.layers["mel"]) for one in recordings if one.speaker == name])
        for name in ("a", "b")
    }
    assert (means["a"].mean(0) - means["b"].mean(0)).norm() < 1e-3
    centroids_KD = clusters.fit_kmeans(
        torch.cat([project(one.layers["mel"]) for one in recordings]), 4
    )
    assert centroids_KD.shape == (4, 6)


def test_recordings_are_normalized_over_their_frames(clusters: Any) -> None:
    frames_TD = 3 + 2 * torch.randn(500, 3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        clusters.centred(frames_TD).mean(0), torch.zeros(3), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(clusters.standardized(frames_TD).std(0), torch.ones(3))

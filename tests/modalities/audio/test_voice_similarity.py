"""The pitch of voices, and how similar two of them are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.pitch import FrameSpectra, track_pitch
from tessera.modalities.audio.voice_similarity import measure_voice, voice_distance

RATE_HZ = 16_000


def pulses(hertz: float, seconds: float = 0.6, brightness: float = 1.0) -> np.ndarray:
    """Return harmonics of a pitch whose amplitudes fall with their number."""
    time = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    numbers = np.arange(1, int(3_000 / hertz))
    waves = np.sin(2 * np.pi * hertz * numbers[:, None] * time) / numbers[:, None] ** brightness
    return (0.1 * waves.sum(0)).astype(np.float32)


def voice(hertz: float, brightness: float = 1.0, gain: float = 1.0) -> Audio:
    return Audio(gain * pulses(hertz, brightness=brightness)[None], RATE_HZ)


@pytest.mark.parametrize("hertz", [80, 123.4, 210, 390])
def test_the_pitch_of_harmonics_is_found(hertz: float) -> None:
    track = track_pitch(FrameSpectra.compute(pulses(hertz).astype(np.float64), RATE_HZ))
    assert track.voiced_T.mean() > 0.9
    assert 2 ** (track.median_semitones / 12) == pytest.approx(hertz, rel=0.01)


def test_noise_has_no_pitch() -> None:
    noise = np.random.default_rng(0).normal(size=RATE_HZ)
    assert math.isnan(track_pitch(FrameSpectra.compute(noise, RATE_HZ)).median_semitones)


def test_level_does_not_change_a_voice() -> None:
    loud, quiet = measure_voice(voice(120)), measure_voice(voice(120, gain=0.05))
    assert loud is not None and quiet is not None
    assert voice_distance(loud, quiet) == pytest.approx(0, abs=0.02)


def test_pitch_and_timbre_change_a_voice() -> None:
    original, higher, darker, both = (
        measure_voice(voice(*settings)) for settings in ((120,), (135,), (120, 1.8), (135, 1.8))
    )
    assert original and higher and darker and both
    distances = [voice_distance(original, one) for one in (higher, darker, both)]
    assert min(distances[:2]) > 0.3
    assert distances[2] > max(distances[:2])


def test_a_voice_without_pitch_is_a_far_one() -> None:
    noise = 0.1 * np.random.default_rng(0).normal(size=(1, RATE_HZ)).astype(np.float32)
    whisper, original = measure_voice(Audio(noise, RATE_HZ)), measure_voice(voice(120))
    assert whisper is not None and original is not None
    assert 2 < voice_distance(whisper, original) < math.inf


@pytest.mark.parametrize("samples", [np.zeros((1, RATE_HZ)), np.full((1, 40), 0.5)])
def test_silence_and_clicks_have_no_voice(samples: np.ndarray) -> None:
    assert measure_voice(Audio(samples.astype(np.float32), RATE_HZ)) is None

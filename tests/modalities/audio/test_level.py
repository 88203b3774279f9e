"""The level of speech, and audio that is scaled to it."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.modalities.audio.level import match_level, speech_level
from tessera.modalities.audio.media import Audio


def tone(amplitude: float, pause_seconds: float = 0.0) -> Audio:
    samples = amplitude * np.sin(np.arange(8_000) / 5)
    pause = np.zeros(round(8_000 * pause_seconds))
    return Audio(np.concatenate([samples, pause])[None].astype(np.float32), 8_000)


def test_pauses_do_not_change_the_level() -> None:
    level = speech_level(tone(0.3))
    assert level == pytest.approx(0.3 / 2**0.5, rel=1e-2)
    assert speech_level(tone(0.3, pause_seconds=2.0)) == pytest.approx(level, rel=1e-3)


def test_audio_is_scaled_to_the_level_without_clipping() -> None:
    quiet = tone(0.1)
    assert speech_level(match_level(quiet, 0.2)) == pytest.approx(0.2, rel=1e-3)
    loudest = match_level(quiet, 5.0)
    assert float(np.abs(loudest.samples).max()) == pytest.approx(1.0, abs=1e-6)


def test_silence_stays_silent() -> None:
    silence = tone(0.0)
    assert speech_level(silence) == 0
    assert not match_level(silence, 0.2).samples.any()

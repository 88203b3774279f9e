"""The level of speech: that of the frames in which somebody speaks, whatever the pauses."""

from __future__ import annotations

import numpy as np

from tessera.modalities.audio.media import Audio

FRAME_SECONDS = 0.02
MIN_POWER = 1e-3
"""Frames with less power, relative to the loudest one, are pauses."""


def speech_level(audio: Audio) -> float:
    """Return the root mean square of all frames but pauses; 0 for silence."""
    samples_N = audio.to_mono().samples[0]
    frame = max(1, round(FRAME_SECONDS * audio.rate_hz))
    padded_N = np.pad(samples_N, (0, -len(samples_N) % frame))
    power_T = np.square(padded_N.reshape(-1, frame)).mean(1)
    is_speech_T = power_T > MIN_POWER * power_T.max()
    return float(np.sqrt(power_T[is_speech_T].mean())) if is_speech_T.any() else 0.0


def match_level(audio: Audio, level: float) -> Audio:
    """Scale audio to a level of speech, as far as no sample exceeds 1; silence stays."""
    own, peak = speech_level(audio), float(np.abs(audio.samples).max(initial=0.0))
    if own == 0:
        return audio
    gain = min(level / own, 1 / peak)
    return Audio(audio.samples * np.float32(gain), audio.rate_hz)

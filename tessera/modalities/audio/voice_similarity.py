"""How similar two voices sound: their mean spectra, how these vary, and their pitch.

Of 52 voices of `examples/voices.py`, the nearest recording of 3 s to another one, of other words,
was of the same voice in 92 % (2 % by chance), with the pitch alone in 34 % and with the mean
spectrum alone in 75 %.

M mel bands, T frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from tessera.losses.spectrogram import log_mel_spectrogram
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.pitch import FrameSpectra, track_pitch

WINDOW_SECONDS, HOP_SECONDS, BANDS = 0.025, 0.01, 40
ACTIVE_NEPERS = 3.0
"""Frames whose level is further below that of the loudest one are left out."""
SEMITONE_DISTANCE = 0.2
"""The distance of a semitone, relative to that of a neper in all bands."""
MIN_LEVEL_NEPERS = -8.0
"""The lowest magnitude in a band, relative to the level of the recording; silence is below it."""
UNVOICED_SEMITONES = 12.0
"""The difference of pitch where one of two recordings has none."""
MIN_SECONDS = 0.1
"""Shorter audio, of which no frame can be analysed, has no profile."""


@dataclass(frozen=True)
class VoiceProfile:
    mean_M: np.ndarray
    """The mean logarithm of the magnitudes in mel bands, relative to the level of the recording."""
    std_M: np.ndarray
    semitones: float
    """The median pitch; NaN if no frame is voiced."""


def measure_voice(audio: Audio) -> VoiceProfile | None:
    """Measure a recording; None if it is silent or too short."""
    samples_N = audio.to_mono().samples[0]
    if audio.seconds < MIN_SECONDS or not np.abs(samples_N).max() > 0:
        return None
    samples_N = samples_N / np.abs(samples_N).max()  # magnitudes have an absolute minimum
    mel_TM = log_mel_spectrogram(
        torch.from_numpy(samples_N)[None],
        rate_hz=audio.rate_hz,
        window=round(WINDOW_SECONDS * audio.rate_hz),
        hop=round(HOP_SECONDS * audio.rate_hz),
        bands=BANDS,
    )[0].T.numpy()
    power_T = np.exp(2 * mel_TM).sum(1)
    is_active_T = power_T > power_T.max() * math.exp(-2 * ACTIVE_NEPERS)
    level = math.log(power_T[is_active_T].mean()) / 2
    active_TM = (mel_TM[is_active_T] - level).clip(MIN_LEVEL_NEPERS)
    pitch = track_pitch(FrameSpectra.compute(samples_N.astype(np.float64), audio.rate_hz))
    return VoiceProfile(active_TM.mean(0), active_TM.std(0), pitch.median_semitones)


def voice_distance(one: VoiceProfile, other: VoiceProfile) -> float:
    """Return the distance of two voices; 0 for the same recording."""
    semitones = abs(one.semitones - other.semitones)
    if math.isnan(semitones):
        semitones = UNVOICED_SEMITONES
    spectrum = root_mean_square(one.mean_M - other.mean_M)
    variation = root_mean_square(one.std_M - other.std_M)
    return spectrum + variation + SEMITONE_DISTANCE * semitones


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))

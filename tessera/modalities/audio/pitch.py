"""The pitch of a voice in short frames, by autocorrelation (Boersma 1993).

N samples, T frames, F frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

WINDOW_SECONDS, HOP_SECONDS = 0.04, 0.01
PITCH_HZ = (75.0, 400.0)
MAX_HARMONIC_HZ = 3_400.0
"""Higher frequencies, where voices are noisy, are left out of the autocorrelation."""
MIN_POWER = 1e-3
"""Frames with less power, relative to the 95th percentile, are not active."""
MIN_VOICING = 0.6
"""Autocorrelation of a voiced frame at the pitch period."""
OCTAVE_COST = 0.01
"""Preference for the shorter of two pitch periods, per octave."""


@dataclass(frozen=True)
class FrameSpectra:
    """Power spectra of frames under a Hann window, padded so that they give autocorrelations."""

    power_TF: np.ndarray
    hertz_F: np.ndarray
    window: np.ndarray
    rate_hz: int

    @classmethod
    def compute(cls, samples_N: np.ndarray, rate_hz: int) -> FrameSpectra:
        """Compute the spectra of samples that are at least a window long."""
        length, hop = round(WINDOW_SECONDS * rate_hz), round(HOP_SECONDS * rate_hz)
        hann, size = np.hanning(length), 1 << (2 * length - 1).bit_length()
        centred_N = samples_N - samples_N.mean()
        frames = np.lib.stride_tricks.sliding_window_view(centred_N, length)[::hop]
        power_TF = np.abs(np.fft.rfft(frames * hann, size, axis=1)) ** 2
        return cls(power_TF, np.fft.rfftfreq(size, 1 / rate_hz), hann, rate_hz)

    @property
    def active_T(self) -> np.ndarray:
        """Which frames are not silent in comparison with the others."""
        total_T = self.power_TF.sum(axis=1)
        return total_T > MIN_POWER * np.percentile(total_T, 95)


@dataclass(frozen=True)
class PitchTrack:
    semitones_T: np.ndarray
    """The pitch of each frame above 1 Hz; without meaning where a frame is not voiced."""
    voiced_T: np.ndarray

    @property
    def median_semitones(self) -> float:
        """The median pitch of voiced frames; NaN if there are none."""
        voiced = self.semitones_T[self.voiced_T]
        return float(np.median(voiced)) if len(voiced) else math.nan


def track_pitch(spectra: FrameSpectra) -> PitchTrack:
    """Find the pitch of each active frame.

    It is the highest peak of the autocorrelation, divided by that of the window, with parabolic
    interpolation.
    """
    rate_hz, window = spectra.rate_hz, spectra.window
    power_TF = np.where(spectra.hertz_F <= MAX_HARMONIC_HZ, spectra.power_TF, 0)
    size = 2 * (power_TF.shape[1] - 1)
    lags = np.arange(int(rate_hz / PITCH_HZ[1]) - 1, int(rate_hz / PITCH_HZ[0]) + 2)
    window_correlation = np.fft.irfft(np.abs(np.fft.rfft(window, size)) ** 2)
    correlation = np.fft.irfft(power_TF, axis=1)
    normalized = correlation[:, lags] / np.maximum(correlation[:, :1], 1e-20)
    normalized = normalized / (window_correlation[lags] / window_correlation[0])
    before, at, after = normalized[:, :-2], normalized[:, 1:-1], normalized[:, 2:]
    peaks = np.where((at > before) & (at >= after), at, -1.0)
    best_T = (peaks - OCTAVE_COST * np.log2(lags[1:-1] / lags[1])).argmax(axis=1)
    rows_T = np.arange(len(best_T))
    left, middle, right = (array[rows_T, best_T] for array in (before, at, after))
    curvature = np.minimum(left - 2 * middle + right, -1e-9)
    offset = (0.5 * (left - right) / curvature).clip(-0.5, 0.5)
    semitones_T = 12 * np.log2(rate_hz / (lags[best_T + 1] + offset))
    return PitchTrack(semitones_T, spectra.active_T & (peaks[rows_T, best_T] > MIN_VOICING))

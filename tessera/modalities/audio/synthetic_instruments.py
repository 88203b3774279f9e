"""Synthesize instruments: plucked strings (Karplus and Strong 1983), bells as sums of partials, and
drums of tones and noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Rng = np.random.Generator
Drum = Literal["boom", "tom", "clap", "tick"]
DRUMS: tuple[Drum, ...] = ("boom", "tom", "clap", "tick")

PARTIALS = (
    (0.5, 0.5, 1.0),
    (1.0, 1.0, 0.8),
    (1.2, 0.8, 0.6),
    (1.5, 0.4, 0.5),
    (2.0, 0.9, 0.45),
    (2.6, 0.4, 0.3),
    (3.0, 0.3, 0.2),
)
"""Partials of a tuned church bell (hum, prime, tierce, quint, nominal and two above): frequency
relative to the prime, amplitude relative to the prime, and decay time relative to the hum."""


@dataclass(frozen=True)
class Instrument:
    name: str
    lowest_hz: float
    decay_seconds: float
    """Time until the amplitude has dropped to a thousandth."""
    brightness: float
    """Of the pluck: 1 is white noise, and lower values are smoother. Bells have none."""
    is_bell: bool = False


INSTRUMENTS = (
    Instrument("a bass string", 55.0, 2.5, 0.25),
    Instrument("a guitar", 147.0, 2.0, 0.55),
    Instrument("a banjo", 262.0, 0.5, 1.0),
    Instrument("a large bell", 220.0, 2.5, 0.0, is_bell=True),
    Instrument("a small bell", 784.0, 1.2, 0.0, is_bell=True),
)


def synthesize_notes(
    instrument: Instrument, notes_hz: Sequence[float], step_seconds: float, rate_hz: int, rng: Rng
) -> np.ndarray:
    """Return (N,) with one note every `step_seconds`.

    A string stops at the next note; a bell keeps ringing.
    """
    synthesize = ring_bell if instrument.is_bell else pluck_string
    note_seconds = (3 if instrument.is_bell else 1) * step_seconds
    notes = [synthesize(instrument, note_hz, note_seconds, rate_hz, rng) for note_hz in notes_hz]
    return overlap_add(notes, step_seconds, rate_hz)


def synthesize_drums(
    drums: Sequence[Drum], step_seconds: float, rate_hz: int, rng: Rng
) -> np.ndarray:
    """Return (N,) with one drum every `step_seconds`."""
    hits = [synthesize_drum(drum, 2 * step_seconds, rate_hz, rng) for drum in drums]
    return overlap_add(hits, step_seconds, rate_hz)


def overlap_add(notes: Sequence[np.ndarray], step_seconds: float, rate_hz: int) -> np.ndarray:
    """Add notes at consecutive steps; longer ones overlap with the next."""
    count = round(len(notes) * step_seconds * rate_hz)
    mix = np.zeros(count)
    for index, note in enumerate(notes):
        start = round(index * step_seconds * rate_hz)
        mix[start : start + len(note)] += note[: count - start]
    return mix


def pluck_string(
    string: Instrument, pitch_hz: float, seconds: float, rate_hz: int, rng: Rng
) -> np.ndarray:
    """Filter a burst of noise in a delay line of one period.

    Each pass averages two neighbouring samples, and a third tap accounts for the fraction of the
    period beyond whole samples.
    """
    count = round(seconds * rate_hz)
    period = rate_hz / pitch_hz - 0.5
    whole, fraction = int(period), period % 1
    feedback = 10 ** (-3 / (string.decay_seconds * pitch_hz))
    taps = feedback * np.array([1 - fraction, 1.0, fraction]) / 2
    burst = rng.uniform(-1, 1, whole + 2)
    for _ in range(round(4 * (1 - string.brightness))):
        burst = (burst + np.roll(burst, 1)) / 2
    samples = np.empty(count + 2 * whole + 4)
    samples[: whole + 2] = burst - burst.mean()
    for start in range(whole + 2, count + whole + 2, whole):
        previous = samples[start - whole - 2 : start]
        samples[start : start + whole] = (
            taps[0] * previous[2:] + taps[1] * previous[1:-1] + taps[2] * previous[:-2]
        )
    return apply_fades(samples[whole + 2 : whole + 2 + count], rate_hz)


def ring_bell(
    bell: Instrument, pitch_hz: float, seconds: float, rate_hz: int, rng: Rng
) -> np.ndarray:
    """Add decaying partials with random phases; the higher ones decay faster."""
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    samples = np.zeros(len(time))
    for ratio, amplitude, decay_ratio in PARTIALS:
        if ratio * pitch_hz < rate_hz / 2:
            decay = np.exp(-6.9 * time / (bell.decay_seconds * decay_ratio))
            phase = 2 * np.pi * (ratio * pitch_hz * time + rng.random())
            samples += amplitude * decay * np.sin(phase)
    return apply_fades(samples, rate_hz)


def synthesize_drum(drum: Drum, seconds: float, rate_hz: int, rng: Rng) -> np.ndarray:
    """Synthesize a falling tone (boom, tom), noise with a tone (clap) or high noise (tick)."""
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    noise = rng.normal(0.0, 1.0, len(time))
    if drum == "boom":
        phase = 2 * np.pi * (48 * time - 3.2 * np.exp(-time / 0.035))
        samples = np.exp(-time / 0.09) * np.sin(phase)
    elif drum == "tom":
        phase = 2 * np.pi * (150 * time - 2.0 * np.exp(-time / 0.05))
        samples = np.exp(-time / 0.12) * np.sin(phase)
    elif drum == "clap":
        samples = np.exp(-time / 0.06) * (0.35 * noise + 0.35 * np.sin(2 * np.pi * 190 * time))
    else:
        samples = 0.16 * np.exp(-time / 0.02) * np.diff(noise, n=2, prepend=[0.0, 0.0])
    return apply_fades(samples, rate_hz)


def apply_fades(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """Fade in over 1 ms and out over 8 ms, to avoid clicks."""
    time = np.arange(len(samples)) / rate_hz
    return samples * np.minimum(time / 0.001, time[::-1] / 0.008).clip(0, 1)

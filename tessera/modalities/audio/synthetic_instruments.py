"""Instruments from formulas: plucked strings (Karplus and Strong 1983), bells as sums of partials,
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
"""Of a tuned church bell (hum, prime, tierce, quint, nominal and two above): frequency, strength
and how long each rings, relative to the prime, the prime and the hum."""


@dataclass(frozen=True)
class Instrument:
    name: str
    lowest_hz: float
    rings_seconds: float
    """until a note is a thousandth as loud"""
    bright: float
    """of the pluck: 1 is noise as it is, and less is a softer finger; a bell has none"""
    is_bell: bool = False


INSTRUMENTS = (
    Instrument("a bass string", 55.0, 2.5, 0.25),
    Instrument("a guitar", 147.0, 2.0, 0.55),
    Instrument("a banjo", 262.0, 0.5, 1.0),
    Instrument("a large bell", 220.0, 2.5, 0.0, is_bell=True),
    Instrument("a small bell", 784.0, 1.2, 0.0, is_bell=True),
)


def played(
    instrument: Instrument, notes_hz: Sequence[float], step_seconds: float, rate_hz: int, rng: Rng
) -> np.ndarray:
    """(N,): a note every `step_seconds`. A string falls silent when it is plucked again; a bell
    rings on."""
    note = rung if instrument.is_bell else plucked
    return laid(
        [
            note(instrument, hertz, (3 if instrument.is_bell else 1) * step_seconds, rate_hz, rng)
            for hertz in notes_hz
        ],
        step_seconds,
        rate_hz,
    )


def struck(drums: Sequence[Drum], step_seconds: float, rate_hz: int, rng: Rng) -> np.ndarray:
    """(N,): a drum every `step_seconds`."""
    return laid(
        [drum_sound(drum, 2 * step_seconds, rate_hz, rng) for drum in drums], step_seconds, rate_hz
    )


def laid(sounds: Sequence[np.ndarray], step_seconds: float, rate_hz: int) -> np.ndarray:
    """One after the other, each at its step; what is longer goes on beneath the next."""
    count = round(len(sounds) * step_seconds * rate_hz)
    heard = np.zeros(count)
    for number, sound in enumerate(sounds):
        begins = round(number * step_seconds * rate_hz)
        heard[begins : begins + len(sound)] += sound[: count - begins]
    return heard


def plucked(string: Instrument, hertz: float, seconds: float, rate_hz: int, rng: Rng) -> np.ndarray:
    """A burst of noise goes round in a loop as long as a period, and each time becomes a little
    softer.

    Two neighbours are averaged, and what is left of the period beside whole samples is a third tap.
    """
    count = round(seconds * rate_hz)
    period = rate_hz / hertz - 0.5
    whole, rest = int(period), period % 1
    keeps = 10 ** (-3 / (string.rings_seconds * hertz))
    taps = keeps * np.array([1 - rest, 1.0, rest]) / 2
    burst = rng.uniform(-1, 1, whole + 2)
    for _ in range(round(4 * (1 - string.bright))):
        burst = (burst + np.roll(burst, 1)) / 2
    sound = np.empty(count + 2 * whole + 4)
    sound[: whole + 2] = burst - burst.mean()
    for begins in range(whole + 2, count + whole + 2, whole):
        turn = sound[begins - whole - 2 : begins]
        sound[begins : begins + whole] = (
            taps[0] * turn[2:] + taps[1] * turn[1:-1] + taps[2] * turn[:-2]
        )
    return faded(sound[whole + 2 : whole + 2 + count], rate_hz)


def rung(bell: Instrument, hertz: float, seconds: float, rate_hz: int, rng: Rng) -> np.ndarray:
    """The partials begin together, each at a phase of its own, and the higher ones end first."""
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    sound = np.zeros(len(time))
    for ratio, strength, rings in PARTIALS:
        if ratio * hertz < rate_hz / 2:
            decay = np.exp(-6.9 * time / (bell.rings_seconds * rings))
            sound += strength * decay * np.sin(2 * np.pi * (ratio * hertz * time + rng.random()))
    return faded(sound, rate_hz)


def drum_sound(drum: Drum, seconds: float, rate_hz: int, rng: Rng) -> np.ndarray:
    """A falling tone for what booms, noise for what claps, and only the highest of it for what
    ticks."""
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    noise = rng.normal(0.0, 1.0, len(time))
    if drum == "boom":
        sound = np.exp(-time / 0.09) * np.sin(2 * np.pi * (48 * time - 3.2 * np.exp(-time / 0.035)))
    elif drum == "tom":
        sound = np.exp(-time / 0.12) * np.sin(2 * np.pi * (150 * time - 2.0 * np.exp(-time / 0.05)))
    elif drum == "clap":
        sound = np.exp(-time / 0.06) * (0.35 * noise + 0.35 * np.sin(2 * np.pi * 190 * time))
    else:
        sound = 0.16 * np.exp(-time / 0.02) * np.diff(noise, n=2, prepend=[0.0, 0.0])
    return faded(sound, rate_hz)


def faded(sound: np.ndarray, rate_hz: int) -> np.ndarray:
    """Without a click at either end: 1 ms and 8 ms."""
    time = np.arange(len(sound)) / rate_hz
    return sound * np.minimum(time / 0.001, time[::-1] / 0.008).clip(0, 1)

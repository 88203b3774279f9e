"""Voices from formulas: a buzz or a breath through the resonances of a mouth (Fant 1960), syllable
by syllable.

A syllable is an onset, which may be missing, and a vowel. A vowel is known by its three lowest
formants; the numbers are the means of 33 men (Peterson and Barney 1952, table II). A speaker is
known by pitch, by the length of the vocal tract, which moves all formants alike, and by how much
breath there is in the voice. Resonators are applied to spectra, one syllable at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Onset = Literal["", "m", "s", "t"]
ONSETS: tuple[Onset, ...] = ("", "m", "s", "t")
VOWELS = {
    "ee": (270.0, 2290.0, 3010.0),
    "eh": (530.0, 1840.0, 2480.0),
    "ah": (730.0, 1090.0, 2440.0),
    "aw": (570.0, 840.0, 2410.0),
    "oo": (300.0, 870.0, 2240.0),
}
"""Spelling -> formants in Hz."""
HIGHER_FORMANTS = (3500.0, 4500.0, 5500.0, 6500.0)
BANDWIDTHS = (
    60.0,
    90.0,
    120.0,
    160.0,
    220.0,
    300.0,
    400.0,
)  # Hz; for each formant, the lowest first
NASAL = (250.0, 1100.0, 2200.0)  # what is heard through the nose
HISS_HZ, HISS_WIDTH_HZ = 5200.0, 1600.0
ONSET_SECONDS = {"": 0.0, "m": 0.08, "s": 0.11, "t": 0.05}
FADE_SECONDS = 0.012
RINGING_SECONDS = 0.05


@dataclass(frozen=True)
class Speaker:
    name: str
    pitch_hz: float
    tract: float
    """how many times higher formants are than a man's"""
    breath: float
    """the share of noise in the voice: 1 whispers"""
    rough: float = 0.0
    """by how much each period differs from the one before"""


SPEAKERS = (
    Speaker("a deep voice", 82.0, 0.88, 0.03),
    Speaker("a man's voice", 122.0, 1.0, 0.05),
    Speaker("a woman's voice", 208.0, 1.17, 0.08),
    Speaker("a child's voice", 310.0, 1.38, 0.08),
    Speaker("a hoarse voice", 104.0, 1.06, 0.4, 0.08),
    Speaker("a whispering voice", 150.0, 1.1, 1.0),
)


@dataclass(frozen=True)
class Syllable:
    onset: Onset
    vowel: str

    @property
    def spelt(self) -> str:
        return self.onset + self.vowel


def spoken(
    speaker: Speaker,
    syllables: Sequence[Syllable],
    asks: bool,
    pitch: float,
    step_seconds: float,
    rate_hz: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """(N,): a syllable every `step_seconds`. The pitch falls by a third, or rises at the end of a
    question."""
    count = round(len(syllables) * step_seconds * rate_hz)
    ringing = round(RINGING_SECONDS * rate_hz)
    progress = np.linspace(0, 1, count)
    bend = np.maximum(progress - 0.45, 0) * 1.5 - 0.1 * progress if asks else -0.28 * progress
    vibrato = 0.012 * np.sin(2 * np.pi * 5.2 * np.arange(count) / rate_hz)
    buzz, breath = source(speaker, speaker.pitch_hz * pitch * (1.12 + bend + vibrato), rate_hz, rng)
    heard = np.zeros(count + ringing)
    edges = np.rint(np.linspace(0, count, len(syllables) + 1)).astype(int)
    for syllable, begin, end in zip(syllables, edges, edges[1:]):
        sound = one_syllable(
            speaker, syllable, buzz[begin:end], breath[begin:end], rate_hz, ringing
        )
        heard[begin : begin + len(sound)] += sound
    return heard[:count]


def source(
    speaker: Speaker, pitch_hz: np.ndarray, rate_hz: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """What the vocal folds give, and noise: both (N,), of about the same power.

    The flow through the folds rises and falls as a cosine (Rosenberg 1971, pulse C), and what is
    heard is its change.
    """
    periods = np.cumsum(pitch_hz) / rate_hz
    wobble = rng.normal(1.0, speaker.rough, int(periods[-1]) + 2)
    strength = rng.normal(1.0, 2 * speaker.rough, int(periods[-1]) + 2)
    phase = (periods % 1) * wobble[periods.astype(int)]
    opening, closing = phase / 0.4, (phase - 0.4) / 0.16
    flow = np.where(
        opening < 1,
        0.5 - 0.5 * np.cos(np.pi * opening),
        np.where(closing < 1, np.cos(np.pi / 2 * closing), 0.0),
    )
    buzz = np.diff(flow * strength[periods.astype(int)], prepend=0.0)
    noise = rng.normal(0.0, 1.0, len(pitch_hz))
    return buzz / max(float(buzz.std()), 1e-9), noise


def one_syllable(
    speaker: Speaker,
    syllable: Syllable,
    buzz: np.ndarray,
    breath: np.ndarray,
    rate_hz: int,
    ringing: int,
) -> np.ndarray:
    """(n + ringing,): the onset, and the vowel from where it ends to a little before the next
    one."""
    count = len(buzz)
    begins = min(round(ONSET_SECONDS[syllable.onset] * rate_hz), count // 2)
    formants = np.array([*VOWELS[syllable.vowel], *HIGHER_FORMANTS]) * speaker.tract
    voiced = (1 - speaker.breath) * buzz + speaker.breath * 0.6 * breath
    vowel = resonated(
        voiced * swell(count, begins, round(0.92 * count), rate_hz), formants, rate_hz, ringing
    )
    if syllable.onset == "m":
        through_nose = np.array([*NASAL, *HIGHER_FORMANTS]) * speaker.tract
        return vowel + 0.35 * resonated(
            voiced * swell(count, 0, begins, rate_hz), through_nose, rate_hz, ringing
        )
    if syllable.onset:
        starts = begins // 2 if syllable.onset == "t" else 0
        loud = (0.9 if syllable.onset == "t" else 0.4) * float(np.abs(vowel).max(initial=0))
        hiss = np.diff(breath, prepend=0.0) * swell(count, starts, begins, rate_hz)
        cut = resonated(
            hiss, np.array([HISS_HZ * speaker.tract]), rate_hz, ringing, (HISS_WIDTH_HZ,)
        )
        return vowel + loud * cut / max(float(np.abs(cut).max(initial=0)), 1e-9)
    return vowel


def swell(count: int, begins: int, ends: int, rate_hz: int) -> np.ndarray:
    """(count,): from 0 to 1 at `begins` and back at `ends`."""
    fade = max(1, round(FADE_SECONDS * rate_hz))
    time = np.arange(count)
    return np.minimum((time - begins) / fade, (ends - time) / fade).clip(0, 1)


def resonated(
    source: np.ndarray,
    formants_hz: np.ndarray,
    rate_hz: int,
    ringing: int,
    bandwidths_hz: Sequence[float] = BANDWIDTHS,
) -> np.ndarray:
    """(n + ringing,): through one resonator for each formant below half of the rate (Klatt
    1980)."""
    size = 1 << int(len(source) + ringing - 1).bit_length()
    turn = np.exp(-2j * np.pi * np.arange(size // 2 + 1) / size)
    response = np.ones(len(turn), dtype=complex)
    for formant, bandwidth in zip(formants_hz.tolist(), bandwidths_hz):
        if formant < 0.47 * rate_hz:
            radius, angle = np.exp(-np.pi * bandwidth / rate_hz), 2 * np.pi * formant / rate_hz
            b, c = 2 * radius * np.cos(angle), -(radius**2)
            response *= (1 - b - c) / (1 - b * turn - c * turn**2)
    return np.fft.irfft(np.fft.rfft(source, size) * response, size)[: len(source) + ringing]

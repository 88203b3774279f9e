"""Synthesize voices with a source-filter model (Fant 1960): glottal pulses or noise through formant
resonators, syllable by syllable.

A syllable is an optional onset and a vowel. A vowel is defined by its three lowest formants, the
means of 33 men (Peterson and Barney 1952, table II). A speaker is defined by pitch, by the length
of the vocal tract, which scales all formants, and by the amount of breath noise. Resonators are
applied in the frequency domain, one syllable at a time.
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
BANDWIDTHS = (60.0, 90.0, 120.0, 160.0, 220.0, 300.0, 400.0)
"""Bandwidth of each formant in Hz, the lowest first."""
NASAL_FORMANTS = (250.0, 1100.0, 2200.0)
FRICATIVE_HZ, FRICATIVE_BANDWIDTH_HZ = 5200.0, 1600.0
ONSET_SECONDS = {"": 0.0, "m": 0.08, "s": 0.11, "t": 0.05}
FADE_SECONDS = 0.012
TAIL_SECONDS = 0.05
"""How long the resonators ring after a syllable."""


@dataclass(frozen=True)
class Speaker:
    name: str
    pitch_hz: float
    formant_scale: float
    """Formant frequencies relative to those of a man."""
    breathiness: float
    """Fraction of noise in the voice; 1 is a whisper."""
    jitter: float = 0.0
    """Standard deviation of the length of a pitch period."""


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
    def text(self) -> str:
        return self.onset + self.vowel


def synthesize_speech(
    speaker: Speaker,
    syllables: Sequence[Syllable],
    is_question: bool,
    pitch_ratio: float,
    step_seconds: float,
    rate_hz: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return (N,) with one syllable every `step_seconds`.

    The pitch falls by a third; in a question it rises at the end.
    """
    count = round(len(syllables) * step_seconds * rate_hz)
    tail = round(TAIL_SECONDS * rate_hz)
    progress = np.linspace(0, 1, count)
    if is_question:
        bend = np.maximum(progress - 0.45, 0) * 1.5 - 0.1 * progress
    else:
        bend = -0.28 * progress
    vibrato = 0.012 * np.sin(2 * np.pi * 5.2 * np.arange(count) / rate_hz)
    pitch_hz = speaker.pitch_hz * pitch_ratio * (1.12 + bend + vibrato)
    pulses, noise = glottal_source(speaker, pitch_hz, rate_hz, rng)
    samples = np.zeros(count + tail)
    edges = np.rint(np.linspace(0, count, len(syllables) + 1)).astype(int)
    for syllable, start, end in zip(syllables, edges, edges[1:]):
        part = synthesize_syllable(
            speaker, syllable, pulses[start:end], noise[start:end], rate_hz, tail
        )
        samples[start : start + len(part)] += part
    return samples[:count]


def glottal_source(
    speaker: Speaker, pitch_hz: np.ndarray, rate_hz: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return glottal pulses and noise, both (N,) and of about the same power.

    The pulses are the derivative of a glottal flow that rises and falls as a cosine (Rosenberg
    1971, pulse C).
    """
    periods = np.cumsum(pitch_hz) / rate_hz
    length = rng.normal(1.0, speaker.jitter, int(periods[-1]) + 2)
    amplitude = rng.normal(1.0, 2 * speaker.jitter, int(periods[-1]) + 2)
    phase = (periods % 1) * length[periods.astype(int)]
    opening, closing = phase / 0.4, (phase - 0.4) / 0.16
    flow = np.where(
        opening < 1,
        0.5 - 0.5 * np.cos(np.pi * opening),
        np.where(closing < 1, np.cos(np.pi / 2 * closing), 0.0),
    )
    pulses = np.diff(flow * amplitude[periods.astype(int)], prepend=0.0)
    noise = rng.normal(0.0, 1.0, len(pitch_hz))
    return pulses / max(float(pulses.std()), 1e-9), noise


def synthesize_syllable(
    speaker: Speaker,
    syllable: Syllable,
    pulses: np.ndarray,
    noise: np.ndarray,
    rate_hz: int,
    tail: int,
) -> np.ndarray:
    """Return (n + tail,): the onset, then the vowel until shortly before the next syllable."""
    count = len(pulses)
    vowel_start = min(round(ONSET_SECONDS[syllable.onset] * rate_hz), count // 2)
    formants = np.array([*VOWELS[syllable.vowel], *HIGHER_FORMANTS]) * speaker.formant_scale
    voiced = (1 - speaker.breathiness) * pulses + speaker.breathiness * 0.6 * noise
    vowel_envelope = fade_envelope(count, vowel_start, round(0.92 * count), rate_hz)
    vowel = apply_formants(voiced * vowel_envelope, formants, rate_hz, tail)
    if syllable.onset == "m":
        nasal = np.array([*NASAL_FORMANTS, *HIGHER_FORMANTS]) * speaker.formant_scale
        envelope = fade_envelope(count, 0, vowel_start, rate_hz)
        return vowel + 0.35 * apply_formants(voiced * envelope, nasal, rate_hz, tail)
    if syllable.onset:
        start = vowel_start // 2 if syllable.onset == "t" else 0
        level = (0.9 if syllable.onset == "t" else 0.4) * float(np.abs(vowel).max(initial=0))
        hiss = np.diff(noise, prepend=0.0) * fade_envelope(count, start, vowel_start, rate_hz)
        fricative = apply_formants(
            hiss,
            np.array([FRICATIVE_HZ * speaker.formant_scale]),
            rate_hz,
            tail,
            (FRICATIVE_BANDWIDTH_HZ,),
        )
        return vowel + level * fricative / max(float(np.abs(fricative).max(initial=0)), 1e-9)
    return vowel


def fade_envelope(count: int, start: int, end: int, rate_hz: int) -> np.ndarray:
    """Return (count,): 0, rising to 1 after `start` and back to 0 at `end`."""
    fade = max(1, round(FADE_SECONDS * rate_hz))
    time = np.arange(count)
    return np.minimum((time - start) / fade, (end - time) / fade).clip(0, 1)


def apply_formants(
    source: np.ndarray,
    formants_hz: np.ndarray,
    rate_hz: int,
    tail: int,
    bandwidths_hz: Sequence[float] = BANDWIDTHS,
) -> np.ndarray:
    """Return (n + tail,): a cascade of resonators for the formants below 0.47 of the rate (Klatt
    1980)."""
    size = 1 << int(len(source) + tail - 1).bit_length()
    z_inverse = np.exp(-2j * np.pi * np.arange(size // 2 + 1) / size)
    response = np.ones(len(z_inverse), dtype=complex)
    for formant, bandwidth in zip(formants_hz.tolist(), bandwidths_hz):
        if formant < 0.47 * rate_hz:
            radius, angle = np.exp(-np.pi * bandwidth / rate_hz), 2 * np.pi * formant / rate_hz
            b, c = 2 * radius * np.cos(angle), -(radius**2)
            response *= (1 - b - c) / (1 - b * z_inverse - c * z_inverse**2)
    return np.fft.irfft(np.fft.rfft(source, size) * response, size)[: len(source) + tail]

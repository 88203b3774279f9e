"""Synthetic audio: voices, plucked strings, bells and drums, with captions.

Example number `i` of a seed is a pure function of `(seed, i)` at any rate and length. A `Piece`
defines who plays what; audio of a given length holds as many whole repetitions of it as fit at
about its tempo, at least one, stretched to fill the length. So the caption holds for every length:
speaker, syllables and their order, instrument, contour of the melody, drums. Voices are synthesized
in `synthetic_voices.py` and instruments in `synthetic_instruments.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tessera.data.dataset import SyntheticDataset
from tessera.data.synthetic import pick
from tessera.modalities.audio.media import (
    AudioBatch,
    AudioExample,
    collate,
    normalize_loudness,
    pad_samples,
)
from tessera.modalities.audio.synthetic_instruments import (
    DRUMS,
    INSTRUMENTS,
    Drum,
    Instrument,
    synthesize_drums,
    synthesize_notes,
)
from tessera.modalities.audio.synthetic_voices import (
    ONSETS,
    SPEAKERS,
    VOWELS,
    Speaker,
    Syllable,
    synthesize_speech,
)

Rng = np.random.Generator

SCALE = (0, 2, 4, 5, 7, 9, 11, 12)  # semitones of a major scale
CONTOURS: dict[str, Callable[[int], list[int]]] = {
    "rising": lambda count: [round(step * 7 / (count - 1)) for step in range(count)],
    "falling": lambda count: [round((count - 1 - step) * 7 / (count - 1)) for step in range(count)],
    "repeated": lambda count: [0] * count,
    "trilling": lambda count: [4 * (step % 2) for step in range(count)],
}
"""Name of a contour -> function from a number of notes to their steps of the scale."""
MIN_RATE_HZ = 8_000
"""Below this rate, fricatives, bells and vowels are no longer distinguishable."""
MIN_SYNTHETIC_SECONDS = 0.1
NUMBERS = ("no", "one", "two", "three", "four", "five")


@dataclass(frozen=True)
class Speech:
    """Syllables of one speaker; the pitch rises at the end of a question."""

    speaker: Speaker
    syllables: tuple[Syllable, ...]
    is_question: bool
    pitch_ratio: float
    """Pitch relative to the speaker's."""

    def __len__(self) -> int:
        return len(self.syllables)

    def render(self, step_seconds: float, repeats: int, rate_hz: int, rng: Rng) -> np.ndarray:
        once = synthesize_speech(
            self.speaker,
            self.syllables,
            self.is_question,
            self.pitch_ratio,
            step_seconds,
            rate_hz,
            rng,
        )
        return np.tile(once, repeats)

    def describe(self) -> str:
        words = " ".join(syllable.text for syllable in self.syllables)
        return f"{self.speaker.name} {'asking' if self.is_question else 'saying'} {words}"


@dataclass(frozen=True)
class Melody:
    """Notes of a scale, played by one instrument."""

    instrument: Instrument
    contour: str
    notes: tuple[int, ...]
    """Steps of the scale."""
    key: float
    """Semitones above the lowest note of the instrument."""

    def __len__(self) -> int:
        return len(self.notes)

    def render(self, step_seconds: float, repeats: int, rate_hz: int, rng: Rng) -> np.ndarray:
        notes_hz = [
            self.instrument.lowest_hz * 2 ** ((self.key + SCALE[note]) / 12) for note in self.notes
        ]
        return synthesize_notes(self.instrument, notes_hz * repeats, step_seconds, rate_hz, rng)

    def describe(self) -> str:
        return f"{self.instrument.name} playing {NUMBERS[len(self.notes)]} {self.contour} notes"


@dataclass(frozen=True)
class Beat:
    """One drum per step."""

    drums: tuple[Drum, ...]

    def __len__(self) -> int:
        return len(self.drums)

    def render(self, step_seconds: float, repeats: int, rate_hz: int, rng: Rng) -> np.ndarray:
        return synthesize_drums(self.drums * repeats, step_seconds, rate_hz, rng)

    def describe(self) -> str:
        return f"drums going {' '.join(self.drums)}"


@dataclass(frozen=True)
class Piece:
    """One or two parts that sound together."""

    parts: tuple[Speech | Melody | Beat, ...]
    """Parts with the same number of steps."""
    tempo_hz: float
    """Steps per second."""
    peak: float
    """Amplitude of the loudest sample."""
    caption: str

    def render(self, count: int, rate_hz: int, rng: Rng) -> np.ndarray:
        """Return (1, count) float32."""
        seconds, steps = count / rate_hz, len(self.parts[0])
        repeats = max(1, round(seconds * self.tempo_hz / steps))
        step_seconds = seconds / (repeats * steps)
        mix = np.zeros(count)
        for part in self.parts:
            samples = part.render(step_seconds, repeats, rate_hz, rng)[:count]
            mix[: len(samples)] += samples / max(float(np.abs(samples).max(initial=0)), 1e-9)
        gain = self.peak / max(float(np.abs(mix).max()), 1e-9)
        return (mix * gain).astype(np.float32)[None]


class SyntheticRecording(Protocol):
    """A description of a recording that can be rendered."""

    @property
    def caption(self) -> str: ...

    def render(self, count: int, rate_hz: int, rng: Rng) -> np.ndarray:
        """Return (1, n) float32 with n at most `count`."""


@dataclass(frozen=True)
class SyntheticAudio(SyntheticDataset):
    samples: int
    """The maximum length of an example."""
    rate_hz: int
    loudness_db: float | None = None
    channels: int = 1

    def caption(self, index: int) -> str:
        """Return the caption of an example without rendering it."""
        return self.recording(index).caption

    def signature(self, index: int) -> str:
        """Return everything besides its number that an example depends on."""
        mono = f"{self.seed} {self.samples} {self.rate_hz} {self.loudness_db}"
        return mono if self.channels == 1 else f"{mono} {self.channels} channels"

    def recording(self, index: int) -> SyntheticRecording:
        return sample_piece(self.seed, self.number(index))

    def item(self, index: int, rng: Rng) -> AudioExample:
        """Render an example; `rng` is not used, because examples have no augmentation."""
        recording = self.recording(index)
        noise_rng = np.random.default_rng([self.seed, self.number(index), 1])
        samples = recording.render(self.samples, self.rate_hz, noise_rng)
        if self.channels == 2:
            samples = pan(samples, self.seed, self.number(index))
        samples = normalize_loudness(samples, self.loudness_db)
        padded, length = pad_samples(samples, self.samples), samples.shape[1]
        return AudioExample(padded, length, self.rate_hz, recording.caption)

    def collate(self, examples: list[AudioExample]) -> AudioBatch:
        return collate(examples)


def pan(samples_1N: np.ndarray, seed: int, number: int) -> np.ndarray:
    """Place an example between left and right, (2, N)."""
    angle = np.random.default_rng([seed, number, 2]).uniform(0, np.pi / 2)
    gains_21 = np.array([[np.cos(angle)], [np.sin(angle)]], np.float32)
    return gains_21 * samples_1N


# ---- sampling


def sample_piece(seed: int, number: int) -> Piece:
    """Sample one piece: a voice, an instrument, drums, or a voice with drums."""
    rng = np.random.default_rng([seed, number])
    kind = int(rng.choice(4, p=[0.45, 0.3, 0.1, 0.15]))
    steps = int(rng.integers(2, 5))
    speech, melody, beat = (
        sample_speech(rng, steps),
        sample_melody(rng, max(3, steps)),
        sample_beat(rng, steps),
    )
    parts = ((speech,), (melody,), (beat,), (speech, beat))[kind]
    tempo_hz = float(rng.uniform(2.6, 3.6)) if kind in (0, 3) else float(rng.uniform(2.5, 5.0))
    caption = " with ".join(part.describe() for part in parts)
    return Piece(parts, tempo_hz, float(rng.uniform(0.5, 0.9)), caption)


def sample_speech(rng: Rng, steps: int) -> Speech:
    syllables = tuple(Syllable(pick(rng, ONSETS), pick(rng, tuple(VOWELS))) for _ in range(steps))
    return Speech(
        pick(rng, SPEAKERS), syllables, bool(rng.random() < 0.35), float(rng.uniform(0.94, 1.07))
    )


def sample_melody(rng: Rng, steps: int) -> Melody:
    contour = pick(rng, tuple(CONTOURS))
    return Melody(
        pick(rng, INSTRUMENTS),
        contour,
        tuple(CONTOURS[contour](steps)),
        float(rng.integers(0, 12)),
    )


def sample_beat(rng: Rng, steps: int) -> Beat:
    return Beat(tuple(pick(rng, DRUMS) for _ in range(steps)))

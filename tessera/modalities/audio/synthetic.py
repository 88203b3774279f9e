"""Toy sounds: voices that say syllables, strings, bells and drums that play patterns, made afresh
for every number.

Toy number `i` of a seed is a pure function of `(seed, i)`, at any rate and length: a `Piece` says
who plays what, and a clip is as many whole repeats of it as fit at about its own tempo, at least
one, stretched to fill the clip. So the caption is true of every clip: who speaks, which syllables
in which order, which instrument, whether a melody rises or falls, which drums. Everything is
computed here, from formulas: `modalities/audio/synthetic_voices.py` speaks and
`modalities/audio/synthetic_instruments.py` plays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tessera.data.dataset import SyntheticDataset
from tessera.modalities.audio.media import AudioBatch, AudioExample, at_loudness, collate
from tessera.modalities.audio.synthetic_instruments import (
    DRUMS,
    INSTRUMENTS,
    Drum,
    Instrument,
    played,
    struck,
)
from tessera.modalities.audio.synthetic_voices import (
    ONSETS,
    SPEAKERS,
    VOWELS,
    Speaker,
    Syllable,
    spoken,
)
from tessera.modalities.image.synthetic import pick

Rng = np.random.Generator

SCALE = (0, 2, 4, 5, 7, 9, 11, 12)  # semitones of a major scale
MELODIES: dict[str, Callable[[int], list[int]]] = {
    "rising": lambda count: [round(step * 7 / (count - 1)) for step in range(count)],
    "falling": lambda count: [round((count - 1 - step) * 7 / (count - 1)) for step in range(count)],
    "repeated": lambda count: [0] * count,
    "trilling": lambda count: [4 * (step % 2) for step in range(count)],
}
"""What a melody is called -> the steps of the scale that so many notes of it are."""
LOWEST_RATE_HZ = 8_000
"""Below it there is not enough left of a hiss, a bell or a vowel to know it by."""
SHORTEST_TOY_SECONDS = 0.1
NUMBERS = ("no", "one", "two", "three", "four", "five")


@dataclass(frozen=True)
class Speech:
    """Somebody says syllables; a question ends high."""

    speaker: Speaker
    syllables: tuple[Syllable, ...]
    asks: bool
    pitch: float
    """relative to the speaker's own"""

    def __len__(self) -> int:
        return len(self.syllables)

    def sound(self, step_seconds: float, repeats: int, rate_hz: int, rng: Rng) -> np.ndarray:
        once = spoken(
            self.speaker, self.syllables, self.asks, self.pitch, step_seconds, rate_hz, rng
        )
        return np.tile(once, repeats)

    def said(self) -> str:
        words = " ".join(syllable.spelt for syllable in self.syllables)
        return f"{self.speaker.name} {'asking' if self.asks else 'saying'} {words}"


@dataclass(frozen=True)
class Melody:
    """An instrument plays notes of a scale."""

    instrument: Instrument
    shape: str
    notes: tuple[int, ...]
    """steps of the scale"""
    key: float
    """semitones above the instrument's lowest note"""

    def __len__(self) -> int:
        return len(self.notes)

    def sound(self, step_seconds: float, repeats: int, rate_hz: int, rng: Rng) -> np.ndarray:
        notes_hz = [
            self.instrument.lowest_hz * 2 ** ((self.key + SCALE[note]) / 12) for note in self.notes
        ]
        return played(self.instrument, notes_hz * repeats, step_seconds, rate_hz, rng)

    def said(self) -> str:
        return f"{self.instrument.name} playing {NUMBERS[len(self.notes)]} {self.shape} notes"


@dataclass(frozen=True)
class Beat:
    drums: tuple[Drum, ...]

    def __len__(self) -> int:
        return len(self.drums)

    def sound(self, step_seconds: float, repeats: int, rate_hz: int, rng: Rng) -> np.ndarray:
        return struck(self.drums * repeats, step_seconds, rate_hz, rng)

    def said(self) -> str:
        return f"drums going {' '.join(self.drums)}"


@dataclass(frozen=True)
class Piece:
    parts: tuple[Speech | Melody | Beat, ...]
    """all of the same number of steps, at the same time"""
    steps_hz: float
    """its own tempo"""
    peak: float
    caption: str

    def play(self, count: int, rate_hz: int, rng: Rng) -> np.ndarray:
        """(1, count) float32"""
        seconds, steps = count / rate_hz, len(self.parts[0])
        repeats = max(1, round(seconds * self.steps_hz / steps))
        step_seconds = seconds / (repeats * steps)
        hash_seed = np.zeros(count)
        for part in self.parts:
            sound = part.sound(step_seconds, repeats, rate_hz, rng)[:count]
            hash_seed[: len(sound)] += sound / max(float(np.abs(sound).max(initial=0)), 1e-9)
        return (hash_seed * (self.peak / max(float(np.abs(hash_seed).max()), 1e-9))).astype(
            np.float32
        )[None]


@dataclass(frozen=True)
class SyntheticAudio(SyntheticDataset):
    samples: int
    rate_hz: int
    loudness_db: float | None = None

    def caption(self, index: int) -> str:
        return self.piece(index).caption

    def signature(self, index: int) -> str:
        """All that a toy depends on beside its number."""
        return f"{self.seed} {self.samples} {self.rate_hz} {self.loudness_db}"

    def piece(self, index: int) -> Piece:
        return imagine(self.seed, self.number(index))

    def item(self, index: int, rng: Rng) -> AudioExample:
        piece = self.piece(index)
        noise = np.random.default_rng(
            [self.seed, self.number(index), 1]
        )  # breath, plucks and drums are made of it
        samples = at_loudness(piece.play(self.samples, self.rate_hz, noise), self.loudness_db)
        return AudioExample(samples, self.samples, self.rate_hz, piece.caption)

    def collate(self, examples: list[AudioExample]) -> AudioBatch:
        return collate(examples)


# ---- what is played


def imagine(seed: int, number: int) -> Piece:
    """The piece of one toy: a voice, an instrument, drums, or a voice with drums."""
    rng = np.random.default_rng([seed, number])
    kind = int(rng.choice(4, p=[0.45, 0.3, 0.1, 0.15]))
    steps = int(rng.integers(2, 5))
    speech, melody, beat = (
        imagine_speech(rng, steps),
        imagine_melody(rng, max(3, steps)),
        imagine_beat(rng, steps),
    )
    parts = ((speech,), (melody,), (beat,), (speech, beat))[kind]
    tempo = float(rng.uniform(2.6, 3.6)) if kind in (0, 3) else float(rng.uniform(2.5, 5.0))
    caption = " with ".join(part.said() for part in parts)
    return Piece(parts, tempo, float(rng.uniform(0.5, 0.9)), caption)


def imagine_speech(rng: Rng, steps: int) -> Speech:
    syllables = tuple(Syllable(pick(rng, ONSETS), pick(rng, tuple(VOWELS))) for _ in range(steps))
    return Speech(
        pick(rng, SPEAKERS), syllables, bool(rng.random() < 0.35), float(rng.uniform(0.94, 1.07))
    )


def imagine_melody(rng: Rng, steps: int) -> Melody:
    shape = pick(rng, tuple(MELODIES))
    return Melody(
        pick(rng, INSTRUMENTS), shape, tuple(MELODIES[shape](steps)), float(rng.integers(0, 12))
    )


def imagine_beat(rng: Rng, steps: int) -> Beat:
    return Beat(tuple(pick(rng, DRUMS) for _ in range(steps)))

"""Synthetic music: short tunes from formulas, each a combination of traits, with several captions.

The traits are instrument (eight), tempo, mode, melody, texture, loudness and effect: 1,728
combinations. About a quarter of them, the same for every seed, are held out: tunes from
`HELD_OUT_START` on have these combinations and no other tunes do, so validation uses unseen
combinations of traits that are all seen in training. A validation set of up to that many tunes has
each combination once.

Tune number `i` of a seed is a pure function of `(seed, i)`: its combination, its key, and its tempo
within the range of its word. One of its captions is sampled whenever the example is read; `caption`
returns a fixed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from tessera.data.dataset import SyntheticDataset
from tessera.data.synthetic import pick
from tessera.modalities.audio.media import normalize_loudness
from tessera.modalities.music.media import MusicBatch, MusicExample, collate

Rng = np.random.Generator

HELD_OUT_START = 1 << 32
"""Tunes from this number on have combinations that tunes before it never have (`data/dataset.py`
holds these out)."""
HELD_OUT_FRACTION = 0.25


@dataclass(frozen=True)
class Timbre:
    """The amplitudes of the harmonics, and the attack and decay of a note."""

    harmonics: tuple[float, ...]
    """The amplitude of each harmonic."""
    lowest_hz: float
    """The frequency of the lowest note."""
    attack_seconds: float = 0.01
    """The duration of the attack."""
    decay_hz: float = 0.0
    """The decay rate per second, times h for harmonic h, as of a plucked string; 0 sustains the
    note."""
    vibrato: float = 0.0
    """The relative depth of a vibrato of 5.5 Hz."""
    breath: float = 0.0
    """The amplitude of added noise."""


TIMBRES = {
    "guitar": Timbre((1.0, 0.7, 0.5, 0.35, 0.25, 0.15), 196.0, 0.004, 1.6),
    "harp": Timbre((1.0, 0.25, 0.08), 392.0, 0.003, 2.2),
    "bass": Timbre((1.0, 0.8, 0.3, 0.2), 65.0, 0.006, 0.8),
    "organ": Timbre((1.0, 0.9, 0.1, 0.7, 0.05, 0.1, 0.05, 0.5), 196.0, 0.02),
    "flute": Timbre((1.0, 0.12, 0.04), 523.0, 0.05, vibrato=0.008, breath=0.06),
    "clarinet": Timbre((1.0, 0.03, 0.7, 0.03, 0.45, 0.03, 0.25), 220.0, 0.03),
    "violin": Timbre((1.0, 0.8, 0.65, 0.55, 0.45, 0.35, 0.3), 330.0, 0.08, vibrato=0.012),
    "bell": Timbre((0.6, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.45), 392.0, 0.002, 0.5),
}
TEMPOS = {"slow": 1.6, "moderate": 3.4, "fast": 7.2}
"""Notes per second."""
SCALES = {"major": (0, 2, 4, 5, 7, 9, 11), "minor": (0, 2, 3, 5, 7, 8, 10)}
SHAPES: dict[str, Callable[[int], int]] = {
    "rising": lambda step: step % 8,
    "falling": lambda step: 7 - step % 8,
    "circling": lambda step: (0, 2, 4, 2)[step % 4],
}
"""Name of a melody -> the degree of the scale of each note."""
TEXTURES = ("alone", "chords")
LOUDNESS_DB = {"quiet": -38.0, "loud": -16.0}
EFFECTS = ("plain", "echo", "tremolo")
KEYS = tuple(range(12))
"""Semitones above an instrument's lowest note at which tunes start, so that the mode can be
inferred only from intervals."""
ECHO_SECONDS, TREMOLO_HZ = 0.19, 11.0

WORDS: dict[str, tuple[str, ...]] = {
    "slow": ("slow", "unhurried"),
    "moderate": ("moderate", "medium-paced"),
    "fast": ("fast", "quick"),
    "rising": ("rising", "climbing"),
    "falling": ("falling", "descending"),
    "circling": ("circling", "turning"),
    "quiet": ("quiet", "soft"),
    "loud": ("loud", "strong"),
    "alone": ("single notes", "one note at a time"),
    "chords": ("chords", "full chords"),
    "plain": ("a dry sound", "no effect"),
    "echo": ("an echo", "echoes"),
    "tremolo": ("a tremolo", "a trembling sound"),
}
"""Trait -> its synonyms in captions."""

PHRASES = (
    "a {tempo}, {loudness} {instrument} tune in a {mode} key, {shape}, in {texture} with {effect}",
    "{loudness} {instrument} music: {tempo}, {shape}, {mode}, {texture}, {effect}",
    "the {instrument} plays a {shape} {mode} melody, {tempo} and {loudness}, {texture}, "
    "with {effect}",
    "{shape} {texture} on a {loudness} {instrument} at a {tempo} tempo, in {mode}, with {effect}",
    "with {effect}, a {tempo} {mode} piece for {instrument}: {loudness}, {shape}, {texture}",
)


@dataclass(frozen=True)
class Traits:
    instrument: str
    tempo: str
    mode: str
    shape: str
    texture: str
    loudness: str
    effect: str

    def tags(self) -> tuple[str, ...]:
        """Return all traits, each by its first synonym."""
        traits = (self.tempo, self.shape, self.texture, self.loudness, self.effect)
        return (self.instrument, f"{self.mode} key", *(WORDS[trait][0] for trait in traits))

    def caption(self, phrase: int, rng: Rng) -> str:
        """Return a caption in one of PHRASES, with sampled synonyms."""
        words = {
            name: pick(rng, WORDS[trait]) if trait in WORDS else trait
            for name, trait in vars(self).items()
        }
        return PHRASES[phrase].format(**words)


@cache
def combinations() -> tuple[tuple[Traits, ...], tuple[Traits, ...]]:
    """Return the combinations for training and those that are held out."""
    every = [
        Traits(*values)
        for values in itertools.product(
            TIMBRES, TEMPOS, SCALES, SHAPES, TEXTURES, LOUDNESS_DB, EFFECTS
        )
    ]
    order = np.random.default_rng(20_260_807).permutation(len(every))
    held_out = round(HELD_OUT_FRACTION * len(every))
    return tuple(every[i] for i in order[held_out:]), tuple(every[i] for i in order[:held_out])


@dataclass(frozen=True)
class Tune:
    traits: Traits
    key: int
    notes_hz: float
    """Notes per second."""
    level_db: float
    """The loudness in dB."""
    phrase: int
    """The index of the fixed caption in PHRASES."""

    def synthesize(self, count: int, rate_hz: int, rng: Rng) -> np.ndarray:
        """Return samples (1, count) float32."""
        time = np.arange(count) / rate_hz
        degrees = (0, 2, 4) if self.traits.texture == "chords" else (0,)
        samples = sum(self.synthesize_voice(time, degree, rng) for degree in degrees)
        assert isinstance(samples, np.ndarray)
        effected = apply_effect(samples, self.traits.effect, rate_hz)
        return normalize_loudness(effected[None].astype(np.float32), self.level_db)

    def synthesize_voice(self, time: np.ndarray, above: int, rng: Rng) -> np.ndarray:
        """Return the tune, transposed up by degrees of the scale."""
        timbre, scale = TIMBRES[self.traits.instrument], SCALES[self.traits.mode]
        steps = (time * self.notes_hz).astype(int)
        degrees = np.array(
            [SHAPES[self.traits.shape](step) + above for step in range(steps[-1] + 1)]
        )
        semitones = self.key + np.array(
            [12 * (degree // 7) + scale[degree % 7] for degree in degrees]
        )
        hertz = timbre.lowest_hz * 2 ** (semitones / 12)
        since = time - steps / self.notes_hz
        return synthesize_notes(timbre, hertz[steps], since, 1 / self.notes_hz, time, rng)


def synthesize_notes(
    timbre: Timbre,
    hertz: np.ndarray,
    since: np.ndarray,
    duration: float,
    time: np.ndarray,
    rng: Rng,
) -> np.ndarray:
    """Return samples of notes of one timbre.

    Harmonics are powers of one complex phasor: sines are the most expensive part, so only one is
    computed. `hertz` is the pitch and `since` the time since the start of the note, at each time.
    """
    rate_hz = (len(time) - 1) / time[-1]
    pitch = (
        hertz * (1 + timbre.vibrato * np.sin(2 * np.pi * 5.5 * time)) if timbre.vibrato else hertz
    )
    # Whole cycles are removed before the conversion to float32, for precision.
    cycles = (np.cumsum(pitch / rate_hz) + rng.random()) % 1
    angles = (2 * np.pi * cycles).astype(np.float32)
    phasor = (np.cos(angles) + 1j * np.sin(angles)) * np.exp(-timbre.decay_hz * since).astype(
        np.float32
    )
    max_harmonic = 0.45 * rate_hz / hertz.astype(np.float32)
    power, samples = phasor.copy(), np.zeros(len(time), np.float32)
    for number, amplitude in enumerate(timbre.harmonics, start=1):
        if amplitude:
            samples += np.float32(amplitude) * power.imag * (number < max_harmonic)
        power *= phasor
    if timbre.breath:
        samples += timbre.breath * rng.standard_normal(len(time), np.float32)
    envelope = np.minimum(since / timbre.attack_seconds, (duration - since) / 0.02).clip(0, 1)
    return samples * envelope.astype(np.float32)


def apply_effect(samples: np.ndarray, effect: str, rate_hz: int) -> np.ndarray:
    """Add an echo or a tremolo, or return the samples unchanged."""
    if effect == "echo":
        delay, echoed = round(ECHO_SECONDS * rate_hz), samples.copy()
        for number in (1, 2, 3):
            if number * delay < len(samples):
                echoed[number * delay :] += 0.6**number * samples[: len(samples) - number * delay]
        return echoed
    if effect == "tremolo":
        return samples * (
            0.55 + 0.45 * np.sin(2 * np.pi * TREMOLO_HZ * np.arange(len(samples)) / rate_hz)
        )
    return samples


def generate_tune(seed: int, number: int) -> Tune:
    """Generate tune `number` of a seed."""
    rng = np.random.default_rng([seed, number])
    training, held_out = combinations()
    # Also drawn for held-out tunes, so that what follows is drawn alike.
    drawn = int(rng.integers(len(training)))
    is_held_out = number >= HELD_OUT_START
    traits = held_out[(number - HELD_OUT_START) % len(held_out)] if is_held_out else training[drawn]
    return Tune(
        traits=traits,
        key=pick(rng, KEYS),
        notes_hz=TEMPOS[traits.tempo] * float(rng.uniform(0.9, 1.1)),
        level_db=LOUDNESS_DB[traits.loudness] + float(rng.uniform(-3, 3)),
        phrase=int(rng.integers(len(PHRASES))),
    )


@dataclass(frozen=True)
class SyntheticMusic(SyntheticDataset):
    samples: int
    """The number of samples of a tune."""
    rate_hz: int
    loudness_db: float | None = None
    """The loudness of all tunes; None keeps that of each tune."""

    def generate(self, index: int) -> Tune:
        """Generate the tune with this index."""
        return generate_tune(self.seed, self.number(index))

    def caption(self, index: int) -> str:
        tune = self.generate(index)
        return tune.traits.caption(
            tune.phrase, np.random.default_rng([self.seed, self.number(index), 2])
        )

    def all_captions(self, index: int) -> list[str]:
        """Return one caption of each phrasing."""
        tune, rng = self.generate(index), np.random.default_rng([self.seed, self.number(index), 3])
        return [tune.traits.caption(phrase, rng) for phrase in range(len(PHRASES))]

    def signature(self, index: int) -> str:
        """Return everything that a tune depends on besides its number."""
        return f"{self.seed} {self.samples} {self.rate_hz} {self.loudness_db}"

    def item(self, index: int, rng: Rng) -> MusicExample:
        tune = self.generate(index)
        noise = np.random.default_rng([self.seed, self.number(index), 1])
        samples = normalize_loudness(
            tune.synthesize(self.samples, self.rate_hz, noise), self.loudness_db
        )
        caption = tune.traits.caption(int(rng.integers(len(PHRASES))), rng)
        return MusicExample(samples, self.samples, self.rate_hz, caption, tune.traits.tags())

    def collate(self, examples: list[MusicExample]) -> MusicBatch:
        return collate(examples)

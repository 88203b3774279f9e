"""Toy music: short tunes from formulas, each a combination of traits, with captions in several
phrasings.

Who plays (eight instruments), how fast, in which mode, where the tune goes, alone or with chords,
how loud, and through which
effect: 1,728 combinations. About a quarter of them, the same for every seed, are never learnt from:
toys from `UNSEEN` on are made of these and no other toys are, so what is held out is a combination
that nobody has heard, of traits that everybody has. A held-out set of up to that many toys has each
combination once.

Toy number `i` of a seed is a pure function of `(seed, i)`: its combination, its key, its tempo
within what its word allows. Which of its captions it comes with is drawn at each visit; `caption`
gives the one that it has by number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from tessera.data.dataset import SyntheticDataset
from tessera.modalities.audio.media import at_loudness
from tessera.modalities.image.synthetic import pick
from tessera.modalities.music.media import MusicBatch, MusicExample, collate

Rng = np.random.Generator

UNSEEN = 1 << 32
"""From this number on toys are combinations that those before never are (`data/dataset.py` holds
these out)."""
HELD_OUT_SHARE = 0.25


@dataclass(frozen=True)
class Timbre:
    """Harmonics by their strength; how a note begins, and how it fades: a plucked one loses its
    high harmonics first."""

    harmonics: tuple[float, ...]
    lowest_hz: float
    attack_seconds: float = 0.01
    fades_hz: float = 0.0
    """how much of the strength goes in a second, of harmonic h times h; 0 sounds on"""
    vibrato: float = 0.0
    """of the pitch, 5.5 times a second"""
    breath: float = 0.0
    """noise beside the tone"""


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
"""Notes a second."""
SCALES = {"major": (0, 2, 4, 5, 7, 9, 11), "minor": (0, 2, 3, 5, 7, 8, 10)}
SHAPES: dict[str, Callable[[int], int]] = {
    "rising": lambda step: step % 8,
    "falling": lambda step: 7 - step % 8,
    "circling": lambda step: (0, 2, 4, 2)[step % 4],
}
"""What a tune is called -> the degree of the scale that each note of it is."""
TEXTURES = ("alone", "chords")
LOUDNESS_DB = {"quiet": -38.0, "loud": -16.0}
EFFECTS = ("plain", "echo", "tremolo")
KEYS = tuple(range(12))
"""Semitones above an instrument's lowest note on which tunes begin: which mode it is, only the
steps between notes tell."""
ECHO_SECONDS, TREMOLO_HZ = 0.19, 11.0

WORDS: dict[str, tuple[str, ...]] = {
    "slow": ("slow", "unhurried"), "moderate": ("moderate", "medium-paced"), "fast": ("fast", "quick"),
    "rising": ("rising", "climbing"), "falling": ("falling", "descending"), "circling": ("circling", "turning"),
    "quiet": ("quiet", "soft"), "loud": ("loud", "strong"),
    "alone": ("single notes", "one note at a time"), "chords": ("chords", "full chords"),
    "plain": ("a dry sound", "no effect"), "echo": ("an echo", "echoes"), "tremolo": ("a tremolo", "a trembling sound"),
}  # fmt: skip
"""Trait -> the words for it."""

PHRASES = (
    "a {tempo}, {loudness} {instrument} tune in a {mode} key, {shape}, in {texture} with {effect}",
    "{loudness} {instrument} music: {tempo}, {shape}, {mode}, {texture}, {effect}",
    "the {instrument} plays a {shape} {mode} melody, {tempo} and {loudness}, {texture}, with {effect}",
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
        """All that is said about it, each by its first word."""
        said = (self.tempo, self.shape, self.texture, self.loudness, self.effect)
        return (self.instrument, f"{self.mode} key", *(WORDS[trait][0] for trait in said))

    def caption(self, phrase: int, rng: Rng) -> str:
        named = {
            name: pick(rng, WORDS[trait]) if trait in WORDS else trait
            for name, trait in vars(self).items()
        }
        return PHRASES[phrase].format(**named)


@cache
def combinations() -> tuple[tuple[Traits, ...], tuple[Traits, ...]]:
    """Those to learn from, and those that are never heard there."""
    every = [
        Traits(*one)
        for one in itertools.product(TIMBRES, TEMPOS, SCALES, SHAPES, TEXTURES, LOUDNESS_DB, EFFECTS)
    ]  # fmt: skip
    order = np.random.default_rng(20_260_807).permutation(len(every))
    unseen = round(HELD_OUT_SHARE * len(every))
    return tuple(every[i] for i in order[unseen:]), tuple(every[i] for i in order[:unseen])


@dataclass(frozen=True)
class Tune:
    traits: Traits
    key: int
    notes_hz: float
    """notes a second"""
    level_db: float
    phrase: int

    def play(self, count: int, rate_hz: int, rng: Rng) -> np.ndarray:
        """(1, count) float32"""
        time = np.arange(count) / rate_hz
        degrees = (0, 2, 4) if self.traits.texture == "chords" else (0,)
        sound = sum(self.voice(time, degree, rng) for degree in degrees)
        assert isinstance(sound, np.ndarray)
        heard = effected(sound, self.traits.effect, rate_hz)
        return at_loudness(heard[None].astype(np.float32), self.level_db)

    def voice(self, time: np.ndarray, above: int, rng: Rng) -> np.ndarray:
        """The tune, so many degrees of the scale above."""
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
        return sounded(timbre, hertz[steps], since, 1 / self.notes_hz, time, rng)


def sounded(
    timbre: Timbre, hertz: np.ndarray, since: np.ndarray, lasts: float, time: np.ndarray, rng: Rng
) -> np.ndarray:
    """Harmonics as powers of one turning number: the most expensive of a tune is a sine, and so
    there is one of it."""
    rate_hz = (len(time) - 1) / time[-1]
    bent = (
        hertz * (1 + timbre.vibrato * np.sin(2 * np.pi * 5.5 * time)) if timbre.vibrato else hertz
    )
    turns = (np.cumsum(bent / rate_hz) + rng.random()) % 1  # whole turns go before precision does
    angles = (2 * np.pi * turns).astype(np.float32)
    turning = (np.cos(angles) + 1j * np.sin(angles)) * np.exp(-timbre.fades_hz * since).astype(
        np.float32
    )
    highest = 0.45 * rate_hz / hertz.astype(np.float32)
    power, sound = turning.copy(), np.zeros(len(time), np.float32)
    for number, strength in enumerate(timbre.harmonics, start=1):
        if strength:
            sound += np.float32(strength) * power.imag * (number < highest)
        power *= turning
    if timbre.breath:
        sound += timbre.breath * rng.standard_normal(len(time), np.float32)
    edges = np.minimum(since / timbre.attack_seconds, (lasts - since) / 0.02).clip(0, 1)
    return sound * edges.astype(np.float32)


def effected(sound: np.ndarray, effect: str, rate_hz: int) -> np.ndarray:
    if effect == "echo":
        late, heard = round(ECHO_SECONDS * rate_hz), sound.copy()
        for number in (1, 2, 3):
            if number * late < len(sound):
                heard[number * late :] += 0.6**number * sound[: len(sound) - number * late]
        return heard
    if effect == "tremolo":
        return sound * (
            0.55 + 0.45 * np.sin(2 * np.pi * TREMOLO_HZ * np.arange(len(sound)) / rate_hz)
        )
    return sound


def imagine(seed: int, number: int) -> Tune:
    rng = np.random.default_rng([seed, number])
    seen, unseen = combinations()
    drawn = int(
        rng.integers(len(seen))
    )  # drawn by the held-out too, so that the rest of both is drawn alike
    traits = unseen[(number - UNSEEN) % len(unseen)] if number >= UNSEEN else seen[drawn]
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
    rate_hz: int
    loudness_db: float | None = None

    def tune(self, index: int) -> Tune:
        return imagine(self.seed, self.number(index))

    def caption(self, index: int) -> str:
        tune = self.tune(index)
        return tune.traits.caption(
            tune.phrase, np.random.default_rng([self.seed, self.number(index), 2])
        )

    def all_captions(self, index: int) -> list[str]:
        """One caption of each phrasing."""
        tune, rng = self.tune(index), np.random.default_rng([self.seed, self.number(index), 3])
        return [tune.traits.caption(phrase, rng) for phrase in range(len(PHRASES))]

    def signature(self, index: int) -> str:
        """All that a toy depends on beside its number."""
        return f"{self.seed} {self.samples} {self.rate_hz} {self.loudness_db}"

    def item(self, index: int, rng: Rng) -> MusicExample:
        tune = self.tune(index)
        noise = np.random.default_rng([self.seed, self.number(index), 1])
        samples = at_loudness(tune.play(self.samples, self.rate_hz, noise), self.loudness_db)
        caption = tune.traits.caption(int(rng.integers(len(PHRASES))), rng)
        return MusicExample(samples, self.samples, self.rate_hz, caption, tune.traits.tags())

    def collate(self, examples: list[MusicExample]) -> MusicBatch:
        return collate(examples)

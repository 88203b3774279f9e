"""Synthetic speech with transcripts: words of the syllables in `synthetic_voices.py`.

Example number `i` of a seed is a pure function of `(seed, i)` and of the length. Each example is
one utterance of a speaker, as long as its words take, and its caption is what is said ("mee sootah
eh"). The name of an example begins with that of its speaker, as the files of a folder with one
subfolder for each speaker.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.data.synthetic import pick
from tessera.modalities.audio.synthetic import SyntheticAudio
from tessera.modalities.audio.synthetic_voices import (
    ONSETS,
    SPEAKERS,
    VOWELS,
    Speaker,
    Syllable,
    synthesize_speech,
)

Rng = np.random.Generator

SYLLABLE_SECONDS = (0.17, 0.22)
"""The range of the duration of a syllable."""
PAUSE_SECONDS = 0.07
"""The pause between two words."""
NOISE = 3e-4
"""The noise of the recording, 70 dB below full scale: no two frames are equal, as in real audio."""
MAX_WORDS = 6
VOICES = tuple(one for one in SPEAKERS if one.breathiness < 1)
"""The speakers without the whispering one, which has no pitch."""


@dataclass(frozen=True)
class Utterance:
    speaker: Speaker
    words: tuple[tuple[Syllable, ...], ...]
    syllable_seconds: float
    pitch_ratio: float
    """Pitch relative to the speaker's."""
    peak: float
    """Amplitude of the loudest sample."""

    @property
    def caption(self) -> str:
        return " ".join("".join(syllable.text for syllable in word) for word in self.words)

    def render(self, count: int, rate_hz: int, rng: Rng) -> np.ndarray:
        """Return (1, n) float32 with n at most `count`."""
        pause = np.zeros(round(PAUSE_SECONDS * rate_hz))
        parts = [pause]
        for word in self.words:
            spoken = synthesize_speech(
                self.speaker, word, False, self.pitch_ratio, self.syllable_seconds, rate_hz, rng
            )
            parts += [spoken / max(float(np.abs(spoken).max()), 1e-9), pause]
        samples = self.peak * np.concatenate(parts)[:count]
        samples += rng.normal(0.0, NOISE, len(samples))
        return samples.astype(np.float32)[None]


@dataclass(frozen=True)
class SyntheticSpeech(SyntheticAudio):
    def name(self, index: int) -> str:
        speaker = self.recording(index).speaker.name.split()[1].replace("'s", "")
        return f"{speaker}/{super().name(index)}"

    def signature(self, index: int) -> str:
        return f"speech {super().signature(index)}"

    def recording(self, index: int) -> Utterance:
        return sample_utterance(self.seed, self.number(index), self.samples / self.rate_hz)


def sample_utterance(seed: int, number: int, max_seconds: float) -> Utterance:
    """Sample a speaker and as many words of one to three syllables as fit, at most MAX_WORDS.

    In less than a second there are fewer words; at least one syllable is always spoken.
    """
    rng = np.random.default_rng([seed, number])
    syllable_seconds = float(rng.uniform(*SYLLABLE_SECONDS))
    max_words = int(rng.integers(2, MAX_WORDS + 1))
    seconds_left = max_seconds - PAUSE_SECONDS
    words: list[tuple[Syllable, ...]] = []
    while len(words) < max_words:
        possible = int((seconds_left - PAUSE_SECONDS) / syllable_seconds)
        if words and possible < 1:
            break
        count = min(int(rng.integers(1, 4)), max(1, possible))
        words.append(
            tuple(Syllable(pick(rng, ONSETS), pick(rng, tuple(VOWELS))) for _ in range(count))
        )
        seconds_left -= count * syllable_seconds + PAUSE_SECONDS
    return Utterance(
        pick(rng, VOICES),
        tuple(words),
        syllable_seconds,
        float(rng.uniform(0.9, 1.12)),
        float(rng.uniform(0.5, 0.9)),
    )

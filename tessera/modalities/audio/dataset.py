"""Sound from a folder, or the built-in toys: clips of one rate and length, each with its caption or
transcript.

Where a clip begins is drawn from the example's own generator, and only that part of the file is
decoded. Channels are mixed to one by their mean. Which files are held out depends on their names
alone (`data/split.py`), and of those the middle is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.discovery import find
from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.io.base import Facts
from tessera.modalities.audio.io.files import ENDINGS, RATES_HZ, SHORTEST_SECONDS, examine, probe
from tessera.modalities.audio.io.libraries import library, resampler
from tessera.modalities.audio.media import (
    Audio,
    AudioBatch,
    AudioExample,
    at_loudness,
    collate,
    padded,
    read_part,
)
from tessera.modalities.audio.synthetic import LOWEST_RATE_HZ, SHORTEST_TOY_SECONDS, SyntheticAudio
from tessera.run.directory import UserError


@dataclass(frozen=True, kw_only=True)
class AudioDataConfig(DataConfig):
    path: str | None = None
    """A folder of recordings, with subfolders; or one recording. None: the built-in toys."""
    rate_hz: int = 16_000
    """Samples a second, whatever the file's own rate is."""
    seconds: float = 2.0
    """How long a clip is."""
    samples: int | None = None
    """How long a clip is, where that must be exact; None: as the seconds say."""
    crop: Literal["random", "centre", "start"] = "random"
    """Where a training clip is cut from a longer recording: anywhere, from its middle, or from its
    beginning."""
    loudness_db: float | None = None
    """Bring every clip to this loudness: the root of the mean square, in decibels of full scale
    (-24, say); None leaves it."""
    short: Literal["pad", "skip"] = "pad"
    """What becomes of shorter recordings: silence follows them, or they are left out."""
    val_fraction: float = 0.05
    """The share held out, chosen by file name; 0 validates on the training clips themselves."""
    split_seed: int = 0
    """Another seed holds out other files."""
    toys: int = 2000
    """How many toy sounds to learn from; those held out come on top."""
    toy_seed: int = 0
    """Another seed is another set of toys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        lowest, highest = RATES_HZ
        if not lowest <= self.rate_hz <= highest:
            raise ValueError(
                f"rate_hz is a number of samples a second, {lowest:,} to {highest:,}, but it is {self.rate_hz}."
            )
        if not SHORTEST_SECONDS <= self.seconds < math.inf:
            raise ValueError(
                f"A clip lasts at least {SHORTEST_SECONDS:g} seconds, but seconds is {self.seconds}."
            )
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"A clip has at least 1 sample, but samples is {self.samples}.")
        if self.path is None and (
            self.rate_hz < LOWEST_RATE_HZ or self.length / self.rate_hz < SHORTEST_TOY_SECONDS
        ):
            raise ValueError(
                f"Toys last at least {SHORTEST_TOY_SECONDS:g} seconds, at {LOWEST_RATE_HZ:,} samples a second or more, "
                f"but here it is {self.length:,} samples at {self.rate_hz:,}."
            )
        if self.loudness_db is not None and not -90 <= self.loudness_db <= 0:
            raise ValueError(
                f"loudness_db is -90 to 0 decibels of full scale, or None, but it is {self.loudness_db}."
            )

    @property
    def length(self) -> int:
        """How many samples a clip has."""
        return round(self.seconds * self.rate_hz) if self.samples is None else self.samples

    def synthetic_dataset(self) -> SyntheticAudio:
        return SyntheticAudio(
            self.toys,
            samples=self.length,
            rate_hz=self.rate_hz,
            loudness_db=self.loudness_db,
            seed=self.toy_seed,
        )

    def folder_dataset(self) -> AudioFolderDataset:
        return AudioFolderDataset.of(find(str(self.path), ENDINGS, "recordings"), self)

    def libraries(self) -> tuple[Callable[[], ModuleType], ...]:
        return (library, resampler)

    def preprocessing(self) -> dict[str, Any]:
        """How a sound is prepared before it is tokenized or measured. How long it is does not
        matter to a codec."""
        return {"rate_hz": self.rate_hz, "loudness_db": self.loudness_db}

    def without_augmentation(self) -> AudioDataConfig:
        return replace(self, crop="centre") if self.crop == "random" else self

    def whole(self, path: str | Path, seconds: float | None, step: int) -> AudioDataConfig:
        """One recording from its beginning, as long as it is or as is asked for, in whole steps of
        so many samples."""
        try:
            lasts = examine(str(path)).count / probe(str(path)).rate_hz
        except UnreadableFile as error:
            raise UserError(str(error)) from None
        if seconds is not None and not 0 < seconds < math.inf:
            raise UserError(
                f"A sound lasts some seconds, but --seconds is {seconds:g}: ask for more than 0, or leave it out."
            )
        if seconds is not None and seconds > lasts:
            raise UserError(
                f"{path} lasts {lasts:.2f} s, but {seconds:g} s are asked for: ask for less, or leave --seconds out."
            )
        asked = lasts if seconds is None else seconds
        samples = math.floor(asked * self.rate_hz) // step * step
        if samples < step:
            raise UserError(
                f"Of {path} {asked:.3f} s are asked for, which is no whole frame of {step / self.rate_hz:.3f} s."
            )
        return replace(self, path=str(path), samples=samples, crop="start", short="pad")

    def sample_metric(self) -> None:
        """Nothing here can tell whether a sound is what its prompt says."""


@dataclass(frozen=True)
class AudioFolderDataset(FileDataset):
    """The source: files of one folder, cut as the configuration says."""

    config: AudioDataConfig

    def item(self, index: int, rng: np.random.Generator) -> AudioExample:
        """Always one draw, for the beginning."""
        drawn = rng.random()
        sound = self.clip(
            self.path(index), {"random": drawn, "centre": 0.5, "start": 0.0}[self.config.crop]
        )
        samples = at_loudness(sound.samples, self.config.loudness_db)
        return AudioExample(
            padded(samples, self.config.length),
            samples.shape[1],
            self.config.rate_hz,
            self.sample_caption(index, rng),
        )

    def collate(self, examples: list[AudioExample]) -> AudioBatch:
        return collate(examples)

    def clip(self, path: str, moment: float) -> Audio:
        """The part of a file that begins at `moment`, 0 for the earliest beginning to 1 for the
        last."""
        sound = self.part(path, probe(path), moment)
        missing = self.config.length - sound.samples.shape[1]
        if missing > 0 and self.config.short == "skip":
            wanted = self.config.length / self.config.rate_hz
            raise UnreadableFile(
                f"{path}: it lasts {sound.seconds:.2f} s, less than the {wanted:.2f} s asked for"
            )
        return sound

    def part(self, path: str, facts: Facts, moment: float) -> Audio:
        """From the length that the file claims; where that does not hold, from what can be read of
        it."""
        try:
            sound = self.part_of(path, facts.seconds, moment)
            promised = math.floor(facts.seconds * self.config.rate_hz)
            if sound.samples.shape[1] >= min(self.config.length, promised):
                return sound
        except UnreadableFile:
            pass
        return self.part_of(path, examine(path).count / facts.rate_hz, moment)

    def part_of(self, path: str, seconds: float, moment: float) -> Audio:
        """Every sample of the rate asked for is as likely to be the first as the others."""
        later = max(0, math.floor(seconds * self.config.rate_hz) - self.config.length)
        start = min(later, int(moment * (later + 1)))
        return read_part(path, start / self.config.rate_hz, self.config.length, self.config.rate_hz)

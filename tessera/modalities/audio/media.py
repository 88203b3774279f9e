"""Sound: any common recording in, (C, N) floats in the middle, WAV out, with a picture to look at.

C counts channels, N samples of each. Models see sound as float32 of shape (1, N) in [-1, 1], where
1 is full scale. How files are read, `modalities/audio/io/files.py` knows, and how sound is drawn,
`modalities/audio/plot.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.io.files import probe, read_samples
from tessera.modalities.audio.io.libraries import library, resampler
from tessera.modalities.audio.plot import draw
from tessera.modalities.image.media import Image

if TYPE_CHECKING:  # listing, checking and playing sounds needs no torch
    import torch

MOST_GAIN = 30.0
"""Decibels by which a quiet clip is made louder at most: the noise between two words should not
become a roar."""
SILENT = 1e-4
"""Below this level there is nothing to make louder: the last bit of 16 is 3e-5."""


@dataclass
class AudioExample:
    samples: np.ndarray
    """(1, N) float32 in [-1, 1]"""
    length: int
    """how many samples are real"""
    rate_hz: int
    caption: str
    """"" where nothing is said about the sound"""


@dataclass
class AudioBatch:
    samples: torch.Tensor
    """(B, 1, N) float32 in [-1, 1]"""
    lengths: torch.Tensor
    """(B,) int64: how many samples of each clip are real"""
    rate_hz: int
    captions: list[str]

    def to(self, device: torch.device | str) -> AudioBatch:
        return replace(self, samples=self.samples.to(device), lengths=self.lengths.to(device))


def collate(examples: Sequence[AudioExample]) -> AudioBatch:
    import torch

    (rate_hz,) = {example.rate_hz for example in examples}  # of one source, hence the same
    samples = torch.from_numpy(np.stack([example.samples for example in examples]))
    lengths = torch.tensor([example.length for example in examples])
    return AudioBatch(samples, lengths, rate_hz, [example.caption for example in examples])


def padded(samples: np.ndarray, count: int) -> np.ndarray:
    """(1, count), with silence after what is there."""
    return np.pad(samples, ((0, 0), (0, count - samples.shape[1])))


def at_loudness(samples: np.ndarray, loudness_db: float | None) -> np.ndarray:
    """So that the root of the mean square is that many decibels of full scale, or None: as it is.

    Less loud, where that would go beyond full scale or raise what is nearly silent.
    """
    level, peak = (
        float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))),
        float(np.abs(samples).max()),
    )
    if loudness_db is None or level < SILENT:
        return samples
    gain = min(10 ** (loudness_db / 20) / level, 10 ** (MOST_GAIN / 20), 1 / peak)
    return (samples * np.float32(gain)).clip(-1, 1)


REACH = 512
"""Samples, at the lower of two rates, beyond which soxr's filter does not reach: a part that is
read with so many more on both sides is resampled as the whole would be."""

PAUSE_SECONDS = 0.4
"""Between an original and its reconstruction."""


@dataclass(eq=False)
class Audio:
    samples: np.ndarray
    """(C, N) float32 in [-1, 1]"""
    rate_hz: int

    def __post_init__(self) -> None:
        if self.samples.dtype != np.float32 or self.samples.ndim != 2 or not self.samples.size:
            raise ValueError(
                f"a Sound holds (channels, samples) of float32, but was given {self.samples.shape} of {self.samples.dtype}"
            )
        if not self.rate_hz > 0:
            raise ValueError(f"a Sound has some samples a second, but its rate is {self.rate_hz}")

    @property
    def seconds(self) -> float:
        return self.samples.shape[1] / self.rate_hz

    @classmethod
    def load(cls, path: str | Path) -> Audio:
        """All of a file that can be read, at its own rate. Raises Unreadable with the file and the
        reason."""
        return cls(read_samples(path), probe(path).rate_hz)

    def save(self, stem: str | Path) -> Path:
        """A WAV of 16 bits, and beside it a PNG of its waveform and spectrogram; gives back the
        WAV."""
        path = Path(f"{stem}.wav")  # not with_suffix, which would eat the end of "epoch-0.5"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write(path)
        self.picture().save(stem)
        return path

    def write(self, path: str | Path) -> None:
        """As the ending says (.wav, .flac), 16 bits; what lies outside [-1, 1] is clipped, and what
        is no number is silent."""
        finite = np.nan_to_num(self.samples, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1, 1)
        library().write(path, finite.T, self.rate_hz, subtype="PCM_16")

    @classmethod
    def sheet(cls, items: Sequence[Audio], columns: int | None = None) -> Image:
        """A contact sheet of waveforms and spectrograms, read like a page."""
        if not items:
            raise ValueError("a sheet of no sounds was asked for: give at least one")
        return Image.sheet([item.picture() for item in items], columns)

    @classmethod
    def beside(cls, left: Audio, right: Audio) -> Audio:
        """An original and its reconstruction: heard one after the other, seen side by side."""
        left, right = left.mono(), right.mono().resampled(left.rate_hz)
        pause = np.zeros((1, round(PAUSE_SECONDS * left.rate_hz)), np.float32)
        return Pair(
            np.concatenate([left.samples, pause, right.samples], axis=1), left.rate_hz, left, right
        )

    def picture(self) -> Image:
        """The waveform, and below it the loudness of each mel band."""
        return draw(self.mono().samples[0], self.rate_hz)

    def mono(self) -> Audio:
        """The mean of the channels."""
        return (
            self
            if len(self.samples) == 1
            else Audio(self.samples.mean(axis=0, keepdims=True), self.rate_hz)
        )

    def resampled(self, rate_hz: int) -> Audio:
        if rate_hz == self.rate_hz:
            return self
        samples = resampler().resample(self.samples.T, self.rate_hz, rate_hz).T
        return Audio(np.ascontiguousarray(samples.clip(-1, 1)), rate_hz)


@dataclass(eq=False)
class Pair(Audio):
    """Two sounds and the pause between them."""

    left: Audio
    right: Audio

    def picture(self) -> Image:
        return Image.beside(self.left.picture(), self.right.picture())


def read_part(path: str | Path, start_seconds: float, count: int, rate_hz: int) -> Audio:
    """One channel at that rate: the `count` samples from start on, or fewer where the file ends.

    Only these are decoded, and what soxr's filter reaches of their surroundings: they are the same
    as in the whole file, resampled. So that they are, reading begins at a sample that lies on both
    grids.
    """
    own = probe(path).rate_hz
    start = round(start_seconds * rate_hz)
    common = math.gcd(own, rate_hz)
    step_own, step_asked = own // common, rate_hz // common
    reach = 0 if own == rate_hz else math.ceil(REACH / min(step_own, step_asked))
    first = max(0, start // step_asked - reach)
    end = -(-(start + count) // step_asked) + reach
    read = (
        Audio(read_samples(path, first * step_own, (end - first) * step_own), own)
        .mono()
        .resampled(rate_hz)
    )
    skipped = start - first * step_asked
    if skipped >= read.samples.shape[1]:
        raise UnreadableFile(f"{path}: it ends before {start_seconds:.2f} s")
    return Audio(read.samples[:, skipped : skipped + count], rate_hz)

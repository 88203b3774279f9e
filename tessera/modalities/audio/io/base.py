"""The interface of audio readers, and the packages that they need.

There are two readers: `io/files.py` reads with soundfile and `io/stream.py` with PyAV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np

from tessera._optional import require

BLOCK_SAMPLES = 4_096
"""Samples per channel that are read at a time."""


@dataclass(frozen=True)
class AudioInfo:
    """What the header of a file states."""

    rate_hz: int
    channels: int
    num_samples: int
    """Samples per channel."""
    codec: str
    """For example "WAV PCM 16", "FLAC PCM 24", "OGG VORBIS", "mp3float" or "aac"."""

    @property
    def seconds(self) -> float:
        return self.num_samples / self.rate_hz


@dataclass(frozen=True)
class Block:
    """Consecutive samples of a file."""

    start: int
    """The index of the first sample."""
    samples: np.ndarray
    """(C, n) float32."""

    @property
    def end(self) -> int:
        return self.start + self.samples.shape[1]


def mix_channels(samples_CN: np.ndarray, channels: int) -> np.ndarray:
    """Return samples of 1 or 2 channels: another number of them is averaged, and repeated."""
    if len(samples_CN) == channels:
        return samples_CN
    return np.repeat(samples_CN.mean(axis=0, keepdims=True), channels, axis=0)


class Reader(Protocol):
    def info(self) -> AudioInfo: ...

    def blocks(self, start: int) -> Iterator[Block]:
        """Yield blocks in order, beginning at or before sample `start`.

        Raises UnreadableFile where the file is damaged.
        """


def import_soundfile() -> ModuleType:
    """Import soundfile, which reads and writes audio files."""
    return require("soundfile", extra="audio", purpose="Reading and writing audio")


def import_soxr() -> ModuleType:
    """Import soxr, which changes sampling rates."""
    return require("soxr", extra="audio", purpose="Resampling audio")


def import_av() -> ModuleType:
    """Import PyAV, which reads the formats that soundfile does not."""
    return require("av", extra="audio", purpose="Reading MP3, OGG, M4A and similar audio")

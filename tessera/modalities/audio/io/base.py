"""What every reader of recordings gives, whatever the file: facts about the whole, and blocks of
samples with their places.

`sound_files.py` and `sound_stream.py` hold a reader each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

BLOCK = 4_096
"""Samples of each channel that are read at a time."""


@dataclass(frozen=True)
class Facts:
    """What a file says of itself."""

    rate_hz: int
    channels: int
    count: int
    """samples of each channel"""
    codec: str
    """WAV PCM 16, FLAC PCM 24, OGG VORBIS, mp3float, aac, ..."""

    @property
    def seconds(self) -> float:
        return self.count / self.rate_hz


@dataclass(frozen=True)
class Block:
    begins: int
    """the number of its first sample"""
    samples: np.ndarray
    """(C, n) float32"""

    @property
    def ends(self) -> int:
        return self.begins + self.samples.shape[1]


class Reader(Protocol):
    def facts(self) -> Facts: ...

    def blocks(self, since: int) -> Iterator[Block]:
        """In order, from the one that holds sample `since`, or some before it. Raises Unreadable
        where the file breaks."""

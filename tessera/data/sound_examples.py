"""What every source of sound gives: one clip with its caption, and a batch of them.

N is the number of samples, B the number of examples. Values are float32 in [-1, 1], one channel. All clips of a batch have N
samples; of a short recording only the first `length` are real, and silence follows. A causal model gives the real ones
the same codes whatever follows, so a task has only to leave the rest out of its loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # listing, checking and playing sounds needs no torch
    import torch

MOST_GAIN = 30.0
"""Decibels by which a quiet clip is made louder at most: the noise between two words should not become a roar."""
SILENT = 1e-4
"""Below this level there is nothing to make louder: the last bit of 16 is 3e-5."""


@dataclass
class SoundExample:
    samples: np.ndarray
    """(1, N) float32 in [-1, 1]"""
    length: int
    """how many samples are real"""
    rate_hz: int
    caption: str
    """"" where nothing is said about the sound"""


@dataclass
class SoundBatch:
    samples: torch.Tensor
    """(B, 1, N) float32 in [-1, 1]"""
    lengths: torch.Tensor
    """(B,) int64: how many samples of each clip are real"""
    rate_hz: int
    captions: list[str]

    def to(self, device: torch.device | str) -> SoundBatch:
        return replace(self, samples=self.samples.to(device), lengths=self.lengths.to(device))


def collate(examples: Sequence[SoundExample]) -> SoundBatch:
    import torch

    (rate_hz,) = {example.rate_hz for example in examples}  # of one source, hence the same
    samples = torch.from_numpy(np.stack([example.samples for example in examples]))
    lengths = torch.tensor([example.length for example in examples])
    return SoundBatch(samples, lengths, rate_hz, [example.caption for example in examples])


def padded(samples: np.ndarray, count: int) -> np.ndarray:
    """(1, count), with silence after what is there."""
    return np.pad(samples, ((0, 0), (0, count - samples.shape[1])))


def at_loudness(samples: np.ndarray, loudness_db: float | None) -> np.ndarray:
    """So that the root of the mean square is that many decibels of full scale, or None: as it is.

    Less loud, where that would go beyond full scale or raise what is nearly silent.
    """
    level, peak = float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))), float(np.abs(samples).max())
    if loudness_db is None or level < SILENT:
        return samples
    gain = min(10 ** (loudness_db / 20) / level, 10 ** (MOST_GAIN / 20), 1 / peak)
    return (samples * np.float32(gain)).clip(-1, 1)

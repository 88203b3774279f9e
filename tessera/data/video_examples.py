"""What every source of clips gives: one clip with its caption, and a batch of them.

T is the number of frames, S the side of the square frames, B the number of examples. Values are float32 in [-1, 1],
channels first. All clips of a batch have T frames; of a picture or a short clip only the first `length` are real, and
the last of these is repeated after it. A causal model gives the real ones the same codes whatever follows, so a task
has only to leave the rest out of its loss: this is how pictures and clips are learnt from together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # listing, checking and drawing clips needs no torch
    import torch


@dataclass
class VideoExample:
    clip: np.ndarray
    """(3, T, S, S) float32 in [-1, 1]"""
    length: int
    """how many frames are real; 1 for a picture"""
    rate_hz: float
    """how many frames a second, to show it as it was"""
    caption: str
    """"" where nothing is said about the clip"""


@dataclass
class VideoBatch:
    clips: torch.Tensor
    """(B, 3, T, S, S) float32 in [-1, 1]"""
    lengths: torch.Tensor
    """(B,) int64: how many frames of each clip are real"""
    rates_hz: list[float]
    captions: list[str]

    def to(self, device: torch.device | str) -> VideoBatch:
        return replace(self, clips=self.clips.to(device), lengths=self.lengths.to(device))


def collate(examples: Sequence[VideoExample]) -> VideoBatch:
    import torch

    clips = torch.from_numpy(np.stack([example.clip for example in examples]))
    lengths = torch.tensor([example.length for example in examples])
    return VideoBatch(clips, lengths, [example.rate_hz for example in examples], [example.caption for example in examples])

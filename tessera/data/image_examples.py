"""What every source of pictures gives: one picture with its caption, and a batch of them.

S is the side of the square pictures, B the number of examples. Values are float32 in [-1, 1], channels first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # listing, checking and drawing pictures needs no torch
    import torch


@dataclass
class ImageExample:
    pixels: np.ndarray
    """(3, S, S) float32 in [-1, 1]"""
    caption: str
    """"" where nothing is said about the picture"""


@dataclass
class ImageBatch:
    pixels: torch.Tensor
    """(B, 3, S, S) float32 in [-1, 1]"""
    captions: list[str]

    def to(self, device: torch.device | str) -> ImageBatch:
        return ImageBatch(self.pixels.to(device), self.captions)


def collate(examples: Sequence[ImageExample]) -> ImageBatch:
    import torch

    pixels = torch.from_numpy(np.stack([example.pixels for example in examples]))
    return ImageBatch(pixels, [example.caption for example in examples])

"""Classifier-free guidance (Ho 2022, arXiv 2207.12598, eq. 6): away from what would be drawn
without the prompt.

How far may depend on how far the drawing has come: guidance in the middle only, or growing, costs
less variety (Kynkäänniemi 2024, 2404.07724, for an interval; Chang 2023, 2301.00704, section 2.7,
for a ramp).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Guidance:
    scale: float = 3.0
    """1 is no guidance: the model as it was trained, at half the cost."""
    start: float = 0.0
    """Guidance begins when this share of the rounds is done,"""
    end: float = 1.0
    """and ends when this share is."""
    ramp: Literal["constant", "linear", "cosine"] = "constant"
    """How the scale grows within them: at once, or from 1."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"A guidance scale is a number, 1 for none, but it is {self.scale}.")
        if not 0 <= self.start <= self.end <= 1:
            raise ValueError(
                f"Guidance from {self.start} to {self.end} is no interval of a drawing: 0 <= start <= end <= 1 is needed."
            )

    def at(self, progress: float) -> float:
        """The scale when this share of the rounds is done."""
        if not self.start <= progress <= self.end:
            return 1.0
        way = (progress - self.start) / (self.end - self.start) if self.end > self.start else 1.0
        grown = {"constant": 1.0, "linear": way, "cosine": (1 - math.cos(math.pi * way)) / 2}[
            self.ramp
        ]
        return 1.0 + (self.scale - 1.0) * grown


def guided(with_prompt: Tensor, without: Tensor, scale: float) -> Tensor:
    return torch.lerp(without, with_prompt, scale)

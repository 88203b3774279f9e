"""Classifier-free guidance (Ho 2022, arXiv 2207.12598, eq. 6).

The scale may depend on the progress of sampling: guidance in an interval, or a growing scale, costs
less diversity (Kynkäänniemi 2024, 2404.07724, for an interval; Chang 2023, 2301.00704, section 2.7,
for a ramp; Yu 2024, 2411.00776, for a cosine ramp with a power).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Ramp = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Guidance:
    scale: float = 3.0
    """Guidance scale. 1 turns guidance off: the model as it was trained, at half the cost."""
    start: float = 0.0
    """Fraction of the decoding steps after which guidance starts."""
    end: float = 1.0
    """Fraction of the decoding steps after which guidance ends."""
    ramp: Ramp = "constant"
    """How the scale grows from 1 between start and end; constant has the full scale at once."""
    ramp_power: float = 1.0
    """Exponent of the time in the ramp: above 1 the scale grows late, below 1 early."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(
                f"The guidance scale must be a finite number, got {self.scale}: use 1 for none."
            )
        if not 0 <= self.start <= self.end <= 1:
            raise ValueError(
                f"Guidance from {self.start} to {self.end} is not an interval of the decoding "
                "steps: use 0 <= start <= end <= 1."
            )
        if self.ramp not in get_args(Ramp):
            names = ", ".join(map(repr, get_args(Ramp)))
            raise ValueError(f"ramp must be one of {names}, got {self.ramp!r}.")
        if not 0 < self.ramp_power < math.inf:
            raise ValueError(f"ramp_power must be finite and above 0, got {self.ramp_power}.")

    def at(self, progress: float) -> float:
        """Return the scale when this fraction of the decoding steps is done."""
        if not self.start <= progress <= self.end:
            return 1.0
        time = (progress - self.start) / (self.end - self.start) if self.end > self.start else 1.0
        time **= self.ramp_power
        ramp = {"constant": 1.0, "linear": time, "cosine": (1 - math.cos(math.pi * time)) / 2}[
            self.ramp
        ]
        return 1.0 + (self.scale - 1.0) * ramp


def apply_cfg(cond_logits: Tensor, uncond_logits: Tensor, scale: float) -> Tensor:
    """Extrapolate from the logits without a prompt to those with it."""
    return torch.lerp(uncond_logits, cond_logits, scale)

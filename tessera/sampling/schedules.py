"""Masking schedules: the fraction of masked tokens, from all at time 0 to none at time 1 (Chang
2022, arXiv 2202.04200, section 3.3)."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, get_args

Schedule = Literal["cosine", "linear", "arccos", "power"]

MEAN_POINTS = 10_000
"""Points of the numerical mean of a schedule."""


def check_schedule(schedule: object) -> None:
    """Raise ValueError unless this is the name of a masking schedule."""
    if schedule not in get_args(Schedule):
        names = ", ".join(map(repr, get_args(Schedule)))
        raise ValueError(f"schedule must be one of {names}, got {schedule!r}.")


def mask_ratio(schedule: Schedule, time: float) -> float:
    """Return the masked fraction at a time in [0, 1].

    Under `cosine` most tokens stay masked for long, under `arccos` few do.
    """
    check_schedule(schedule)
    if schedule == "cosine":
        return math.cos(math.pi / 2 * time)
    if schedule == "arccos":
        return math.acos(time) / (math.pi / 2)
    return 1 - time if schedule == "linear" else 1 - time**2


@cache
def mean_mask_ratio(schedule: Schedule, time_power: float = 1.0) -> float:
    """Return the mean of the masked fraction at times u^time_power, for u uniform in [0, 1]."""
    if time_power == 1:
        exact = {"cosine": 2 / math.pi, "arccos": 2 / math.pi, "linear": 0.5, "power": 2 / 3}
        return exact[schedule]
    midpoints = ((i + 0.5) / MEAN_POINTS for i in range(MEAN_POINTS))
    return math.fsum(mask_ratio(schedule, u**time_power) for u in midpoints) / MEAN_POINTS


def num_masked_after(schedule: Schedule, step: int, decoding_steps: int, total: int) -> int:
    """Return how many of `total` tokens are masked after step 0, 1, ...; 0 after the last."""
    if step + 1 >= decoding_steps:
        return 0
    return math.floor(total * mask_ratio(schedule, (step + 1) / decoding_steps))

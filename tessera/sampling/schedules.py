"""Masking schedules: the fraction of masked tokens, from all at time 0 to none at time 1 (Chang
2022, arXiv 2202.04200, section 3.3)."""

from __future__ import annotations

import math
from typing import Literal, get_args

Schedule = Literal["cosine", "linear", "arccos", "power"]


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


def mean_mask_ratio(schedule: Schedule) -> float:
    """Return the masked fraction averaged over all times."""
    return {"cosine": 2 / math.pi, "arccos": 2 / math.pi, "linear": 0.5, "power": 2 / 3}[schedule]


def num_masked_after(schedule: Schedule, step: int, decoding_steps: int, total: int) -> int:
    """Return how many of `total` tokens are masked after step 0, 1, ...; 0 after the last."""
    if step + 1 >= decoding_steps:
        return 0
    return math.floor(total * mask_ratio(schedule, (step + 1) / decoding_steps))

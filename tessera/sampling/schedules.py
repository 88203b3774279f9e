"""How many symbols are hidden when: all of them at time 0, none at time 1 (Chang 2022, arXiv
2202.04200, section 3.3)."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "arccos", "power"]


def hidden_share(schedule: Schedule, time: float) -> float:
    """The share hidden at a time in [0, 1]; `cosine` hides much for long, `arccos` little."""
    if schedule == "cosine":
        return math.cos(math.pi / 2 * time)
    if schedule == "arccos":
        return math.acos(time) / (math.pi / 2)
    return 1 - time if schedule == "linear" else 1 - time**2


def mean_share(schedule: Schedule) -> float:
    """The share hidden on average over all times."""
    return {"cosine": 2 / math.pi, "arccos": 2 / math.pi, "linear": 0.5, "power": 2 / 3}[schedule]


def hidden_after(schedule: Schedule, round_number: int, decoding_steps: int, total: int) -> int:
    """How many of `total` stay hidden after round 0, 1, ...; 0 after the last one."""
    if round_number + 1 >= decoding_steps:
        return 0
    return math.floor(total * hidden_share(schedule, (round_number + 1) / decoding_steps))

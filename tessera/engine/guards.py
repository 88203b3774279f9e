"""Watches a run: steps whose numbers are not finite, and states that a person should hear about,
with a remedy."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from tessera.engine.task import Alarm
from tessera.run.directory import UserError


class Diverged(UserError):
    """Too many steps in a row gave numbers that are not finite. Weights and checkpoints are the
    last healthy ones."""

    exit_code = 1


class NonFiniteGuard:
    """Counts skipped updates; after `patience` in a row there is no point in going on."""

    def __init__(self, patience: int):
        self.patience = patience
        self.skipped = 0
        self.in_a_row: dict[str, int] = defaultdict(int)

    def fine(self, update: str) -> None:
        self.in_a_row[update] = 0

    def skip(self, update: str, names: list[str]) -> None:
        self.skipped += 1
        self.in_a_row[update] += 1
        if self.in_a_row[update] >= self.patience:
            raise Diverged(
                f"The loss or gradient of {update!r} was not finite in {self.patience} steps in a row. No weight was touched "
                f"by them, and the last checkpoint is healthy. The examples of the last one: {', '.join(names[:8])}. "
                "Lower the learning rate, use --precision fp32, or look at those files with `tessera check`."
            )

    def state(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped, "in_a_row": dict(self.in_a_row)}

    def restore(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped_steps"]
        self.in_a_row = defaultdict(int, state["in_a_row"])


@dataclass
class Health:
    """Compares each record with the task's alarms; an alarm is raised once, and again only after it
    was well."""

    alarms: tuple[Alarm, ...]

    def __post_init__(self) -> None:
        self._out: dict[str, int] = defaultdict(int)

    def listen(self, step: int, record: dict[str, float]) -> list[str]:
        return [
            message
            for alarm in self.alarms
            if (message := self._heard(alarm, step, record)) is not None
        ]

    def _heard(self, alarm: Alarm, step: int, record: dict[str, float]) -> str | None:
        value = record.get(alarm.metric)
        if value is None or step < alarm.after:
            return None
        low = alarm.below is not None and value < alarm.below
        high = alarm.above is not None and value > alarm.above
        self._out[alarm.name] = self._out[alarm.name] + 1 if low or high else 0
        if self._out[alarm.name] != alarm.patience:
            return None
        bound = f"below {alarm.below}" if low else f"above {alarm.above}"
        return f"{alarm.name}: {alarm.metric} is {value:.4g}, {bound}, for {alarm.patience} records. {alarm.hint}"

"""Learning rate schedules of the trainers: our own by name, or a scheduler class of torch.

The learning rate of a run is a function of the step. A scheduler class is run ahead on an optimizer
of its own to find that function, so it is not saved and does not depend on resuming.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import get_args

import torch
from torch.optim.lr_scheduler import LRScheduler

from tessera.engine.optim.config import OptimizerConfig, Schedule
from tessera.engine.task import Task
from tessera.run.directory import Json
from tessera.run.errors import UserError
from tessera.trainers.arguments import SCHEDULER_KWARGS, translate_kwargs


class TorchSchedule:
    """The learning rates that a scheduler class of torch sets, by step."""

    def __init__(self, scheduler: type[LRScheduler], kwargs: Mapping[str, object], lr: float):
        optimizer = torch.optim.AdamW([torch.zeros(1)], lr=lr)
        build: Callable[..., LRScheduler] = scheduler
        try:
            self._scheduler = build(optimizer, **kwargs)
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(
                f"scheduler is {scheduler.__name__}, which cannot be constructed with "
                f"scheduler_kwargs {dict(kwargs)}: {error}."
            ) from None
        self._optimizer = optimizer
        self._rates = [self._current_lr()]

    def lr_at(self, step: int) -> float:
        while len(self._rates) <= step:
            with warnings.catch_warnings():  # the optimizer takes no steps
                warnings.simplefilter("ignore")
                self._scheduler.step()
            self._rates.append(self._current_lr())
        return self._rates[step]

    def _current_lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


@dataclass(frozen=True, kw_only=True)
class TorchScheduledOptimizer(OptimizerConfig):
    """An optimizer whose learning rate follows a scheduler class after a linear warm-up.

    During the warm-up the scheduler's rate is multiplied by the fraction of it that is done.
    """

    torch_schedule: TorchSchedule = field(compare=False)

    def lr_at(self, step: int, steps: int) -> float:
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.torch_schedule.lr_at(step) * warmup


@dataclass(frozen=True)
class ScheduleArguments:
    """The arguments `scheduler`, `scheduler_kwargs` and `warmup_steps` of a trainer."""

    fields: Json
    """The fields of OptimizerConfig."""
    scheduler: type[LRScheduler] | None = None
    kwargs: Mapping[str, object] = field(default_factory=dict)

    @property
    def settings(self) -> Json:
        """What config.json states about a scheduler class."""
        if self.scheduler is None:
            return {}
        kwargs = {
            name: value if isinstance(value, (bool, int, float, str, list)) else repr(type(value))
            for name, value in self.kwargs.items()
        }
        return {"scheduler": self.scheduler.__name__, "scheduler_kwargs": kwargs}

    def configure(self, optimizer: OptimizerConfig) -> OptimizerConfig:
        """Return the optimizer with the schedule of the class, if one was given."""
        if self.scheduler is None:
            return optimizer
        values = {one.name: getattr(optimizer, one.name) for one in fields(OptimizerConfig)}
        schedule = TorchSchedule(self.scheduler, self.kwargs, optimizer.lr)
        return TorchScheduledOptimizer(**values, torch_schedule=schedule)

    def apply(self, task: Task) -> None:
        """Give all updates of a task the schedule of the class."""
        task.updates = tuple(
            replace(update, optimizer=self.configure(update.optimizer)) for update in task.updates
        )


def parse_schedule(
    scheduler: object, scheduler_kwargs: Mapping[str, object] | None, warmup_steps: int
) -> ScheduleArguments:
    """Return a schedule after a linear warm-up; without a scheduler the rate stays constant."""
    constant = {
        "schedule": "warmup" if warmup_steps else "constant",
        "warmup_steps": warmup_steps,
    }
    if is_function_of_step(scheduler):
        return ScheduleArguments(constant, scheduler, dict(scheduler_kwargs or {}))  # type: ignore[arg-type]
    translated = translate_kwargs(scheduler_kwargs, "scheduler_kwargs", SCHEDULER_KWARGS)
    if scheduler is None:
        return ScheduleArguments(constant | translated)
    if scheduler not in get_args(Schedule):
        raise UserError(
            f"scheduler is {scheduler!r}, but the learning rate is a function of the step: use a "
            f"scheduler class of torch that is one, such as CosineAnnealingLR or StepLR, or "
            f"{', '.join(map(repr, get_args(Schedule)))}, or None for a constant learning rate "
            "after the warm-up."
        )
    return ScheduleArguments({"schedule": scheduler, "warmup_steps": warmup_steps} | translated)


def is_function_of_step(scheduler: object) -> bool:
    """Return whether this is a scheduler class whose `step` needs no metric."""
    if not (inspect.isclass(scheduler) and issubclass(scheduler, LRScheduler)):
        return False
    parameters = list(inspect.signature(scheduler.step).parameters.values())[1:]
    return all(one.default is not inspect.Parameter.empty for one in parameters)

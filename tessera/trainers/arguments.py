"""The words of the research code in the engine's. What there is no word for is refused, never
dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from tessera.engine.ema import EMAConfig
from tessera.engine.engine import EngineConfig, Precision
from tessera.engine.optim.config import Schedule
from tessera.run.config import did_you_mean
from tessera.run.errors import UserError

GIVEN = "the dataset given in Python"
"""Stands where the configuration names the folder: the card says so, and `evaluate` finds no such
folder and asks for one."""

AVERAGE = {"beta": "decay", "update_after_step": "update_after", "update_every": "update_every"}
SCHEDULE = {"initial": "initial", "floor": "floor", "cooldown": "cooldown"}
"""What may stand in ema_kwargs and scheduler_kwargs, and our words for it."""


def engine_config(
    steps: int,
    batch_size: int,
    grad_accum_steps: int,
    results_every: int,
    model_every: int,
    ema: EMAConfig,
    accelerate_kwargs: Mapping[str, Any] | None,
    parameter: str = "accelerate_kwargs",
) -> EngineConfig:
    """Their words for the life of a run, in the engine's: a batch of theirs is a micro-batch of
    ours."""
    return EngineConfig(
        steps=steps,
        batch_size=batch_size * grad_accum_steps,
        grad_accum_steps=grad_accum_steps,
        log_every=1,
        validate_every=results_every,
        sample_every=results_every,
        checkpoint_every=model_every,
        ema=ema,
        **understood(accelerate_kwargs or {}, parameter),
    )


def ema_config(used: bool, beta: float, update_after: int, update_every: int) -> EMAConfig:
    return EMAConfig(
        decay=beta if used else 0.0, update_after=update_after, update_every=update_every
    )


def understood(accelerate_kwargs: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    """The engine's words for what was meant for Accelerate; what it has no word for is refused, not
    dropped."""
    precisions: dict[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
    meant: dict[str, Any] = {}
    for name, value in accelerate_kwargs.items():
        if name == "mixed_precision" and value in precisions:
            meant["precision"] = precisions[value]
        elif name == "log_with":
            meant["track"] = tuple([value] if isinstance(value, str) else value)
        else:
            raise UserError(
                f"{parameter} has {name}={value!r}, which this engine does not know. It takes mixed_precision "
                "(no, bf16 or fp16) and log_with (tensorboard, wandb, trackio)."
            )
    return meant


def refuse_clearing(asked: bool | None) -> None:
    """None and False, which keep what is there, are what always happens."""
    if asked:
        raise UserError(
            "force_clear_prev_results would delete earlier results, and nothing here deletes what somebody trained: give "
            "another results_folder, or leave it out to go on."
        )


def translated(
    given: Mapping[str, Any] | None, parameter: str, words: Mapping[str, str]
) -> dict[str, Any]:
    """Settings under their names, under ours; what there is no word for is refused, not dropped."""
    for name, value in (given or {}).items():
        if name not in words:
            raise UserError(
                f"{parameter} has {name}={value!r}, which means nothing here{did_you_mean(name, words)}"
            )
    return {words[name]: value for name, value in (given or {}).items()}


def scheduled(scheduler: Any, warmup_steps: int) -> dict[str, Any]:
    """The rate rises over the warm-up and then does what the schedule says: nothing, if there is
    none."""
    if scheduler is None:
        return {"schedule": "warmup" if warmup_steps else "constant", "warmup": warmup_steps}
    if scheduler not in get_args(Schedule):
        raise UserError(
            f"scheduler is {scheduler!r}, but rates here are functions of the step and not of a scheduler object: give one of "
            f"{', '.join(map(repr, get_args(Schedule)))}, or None, which stays constant after the warm-up."
        )
    return {"schedule": scheduler, "warmup": warmup_steps}


def ema_config_from_kwargs(ema_kwargs: Mapping[str, Any] | None) -> EMAConfig:
    """The defaults are those of the averaging that the research code used: slow, and made for long
    runs."""
    given = translated(ema_kwargs, "ema_kwargs", AVERAGE)
    return EMAConfig(**({"decay": 0.9999, "update_after": 100, "update_every": 10} | given))

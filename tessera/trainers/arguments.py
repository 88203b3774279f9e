"""Translate arguments of the research packages to configurations.

An argument without a counterpart raises UserError; none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from tessera.engine.ema import EMAConfig
from tessera.engine.engine import EngineConfig, Precision
from tessera.engine.logging import TRACKERS
from tessera.engine.optim.config import Schedule
from tessera.run.config import did_you_mean
from tessera.run.directory import Json
from tessera.run.errors import UserError

EMA_KWARGS = {"beta": "decay", "update_after_step": "update_after", "update_every": "update_every"}
"""The names that `ema_kwargs` may have, and the fields of EMAConfig."""
SCHEDULER_KWARGS = {name: name for name in ("warmup_start_lr", "min_lr_ratio", "decay_ratio")}
"""The names that `scheduler_kwargs` may have, and the fields of OptimizerConfig."""
PRECISIONS: dict[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""The values of `mixed_precision`, and those of EngineConfig.precision."""


def build_engine_config(
    *,
    steps: int,
    micro_batch_size: int,
    grad_accum_steps: int,
    validate_every: int,
    checkpoint_every: int,
    ema: EMAConfig,
    accelerate_kwargs: Mapping[str, object] | None,
    parameter: str = "accelerate_kwargs",
) -> EngineConfig:
    """Build the engine configuration; the research packages' batch size is per micro-batch."""
    return EngineConfig(
        steps=steps,
        batch_size=micro_batch_size * grad_accum_steps,
        grad_accum_steps=grad_accum_steps,
        log_every=1,
        validate_every=validate_every,
        sample_every=validate_every,
        checkpoint_every=checkpoint_every,
        ema=ema,
        **translate_accelerate_kwargs(accelerate_kwargs or {}, parameter),
    )


def build_ema_config(enabled: bool, beta: float, update_after: int, update_every: int) -> EMAConfig:
    return EMAConfig(
        decay=beta if enabled else 0.0, update_after=update_after, update_every=update_every
    )


def translate_accelerate_kwargs(accelerate_kwargs: Mapping[str, Any], parameter: str) -> Json:
    """Translate arguments of `accelerate.Accelerator` to fields of EngineConfig."""
    fields: Json = {}
    for name, value in accelerate_kwargs.items():
        if name == "mixed_precision" and value in PRECISIONS:
            fields["precision"] = PRECISIONS[value]
        elif name == "log_with":
            fields["log_with"] = (value,) if isinstance(value, str) else tuple(value)
        else:
            raise UserError(
                f"{parameter} has {name}={value!r}, which is not supported: use mixed_precision "
                f"({', '.join(PRECISIONS)}) or log_with ({', '.join(TRACKERS)})."
            )
    return fields


def translate_ema_kwargs(ema_kwargs: Mapping[str, object] | None) -> EMAConfig:
    """Build the EMA configuration with the defaults of the package ema-pytorch."""
    defaults: Json = {"decay": 0.9999, "update_after": 100, "update_every": 10}
    return EMAConfig(**(defaults | translate_kwargs(ema_kwargs, "ema_kwargs", EMA_KWARGS)))


def translate_kwargs(
    kwargs: Mapping[str, object] | None, parameter: str, names: Mapping[str, str]
) -> Json:
    """Rename the keys of `kwargs` by `names`; raise UserError for a key that is not in it."""
    given = kwargs or {}
    for name, value in given.items():
        if name not in names:
            raise UserError(
                f"{parameter} has {name}={value!r}, which is not supported"
                f"{did_you_mean(name, names)}"
            )
    return {names[name]: value for name, value in given.items()}


def translate_scheduler(scheduler: object, warmup_steps: int) -> Json:
    """Return the fields of OptimizerConfig for a schedule after a linear warm-up.

    Without a scheduler the learning rate is constant after the warm-up.
    """
    if scheduler is None:
        schedule = "warmup" if warmup_steps else "constant"
        return {"schedule": schedule, "warmup_steps": warmup_steps}
    if scheduler not in get_args(Schedule):
        raise UserError(
            f"scheduler is {scheduler!r}, but the learning rate is a function of the step and "
            f"needs no scheduler object: use {', '.join(map(repr, get_args(Schedule)))}, or None "
            "for a constant learning rate after the warm-up."
        )
    return {"schedule": scheduler, "warmup_steps": warmup_steps}


def check_clear_results(force_clear_prev_results: bool | None) -> None:
    """Raise UserError if earlier results should be deleted; None and False keep them."""
    if force_clear_prev_results:
        raise UserError(
            "force_clear_prev_results is True, but earlier results are never deleted: use another "
            "results_folder, or leave force_clear_prev_results out to resume."
        )

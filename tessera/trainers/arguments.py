"""Translate arguments of the research packages to configurations.

An argument without a counterpart raises UserError; none is ignored.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import ParamSpec, Union, get_args, get_origin, get_type_hints

from tessera.engine.config import EngineConfig, Precision
from tessera.engine.ema import EMAConfig
from tessera.engine.logging import TRACKERS
from tessera.run.config import did_you_mean
from tessera.run.directory import Json
from tessera.run.errors import UserError

EMA_KWARGS = {"beta": "decay", "update_after_step": "update_after", "update_every": "update_every"}
"""The names that `ema_kwargs` may have, and the fields of EMAConfig."""
SCHEDULER_KWARGS = {name: name for name in ("warmup_start_lr", "min_lr_ratio", "decay_ratio")}
"""The names that `scheduler_kwargs` may have, and the fields of OptimizerConfig."""
PRECISIONS: dict[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""The values of `mixed_precision`, and those of EngineConfig.precision."""
IN_MEMORY = "a dataset in memory"
"""The path in the configuration of a run whose dataset was given as a Python object.

The model card states it, and commands that read the data report that there is no such folder.
"""

Parameters = ParamSpec("Parameters")
SIMPLE_TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    type(None): (type(None), "None"),
}
"""The annotations that are checked: the class of allowed values, which includes numbers of NumPy,
and its name in an error message."""


def check_arguments(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Make a constructor raise UserError if a number or a flag has a value of another type."""

    @functools.wraps(init)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        hints = get_type_hints(init)
        for name, value in inspect.signature(init).bind(*args, **kwargs).arguments.items():
            if name in hints:
                check_argument(name, value, hints[name])
        init(*args, **kwargs)

    return checked


def check_argument(name: str, value: object, hint: object) -> None:
    is_union = get_origin(hint) in (Union, types.UnionType)
    options = get_args(hint) if is_union else (hint,)
    if not all(option in SIMPLE_TYPES for option in options):
        return
    is_flag = isinstance(value, bool)
    fits = any(
        isinstance(value, SIMPLE_TYPES[option][0]) and (option is bool or not is_flag)
        for option in options
    )
    if not fits:
        expected = " or ".join(SIMPLE_TYPES[option][1] for option in options)
        raise UserError(f"{name} must be {expected}, got {value!r}.")


def build_engine_config(
    *,
    steps: int,
    micro_batch_size: int,
    grad_accum_steps: int,
    validate_every: int,
    checkpoint_every: int,
    ema: EMAConfig,
    num_workers: int,
    accelerate_kwargs: Mapping[str, object] | None,
    parameter: str = "accelerate_kwargs",
) -> EngineConfig:
    """Build the engine configuration; the research packages' batch size is per micro-batch."""
    return EngineConfig(
        steps=steps,
        num_workers=num_workers,
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


def translate_accelerate_kwargs(accelerate_kwargs: Mapping[str, object], parameter: str) -> Json:
    """Translate arguments of `accelerate.Accelerator` to fields of EngineConfig."""
    fields: Json = {}
    for name, value in accelerate_kwargs.items():
        if name == "mixed_precision" and isinstance(value, str) and value in PRECISIONS:
            fields["precision"] = PRECISIONS[value]
        elif name == "log_with" and isinstance(value, (str, list, tuple)):
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


def check_clear_results(force_clear_prev_results: bool | None) -> None:
    """Raise UserError if earlier results should be deleted; None and False keep them."""
    if force_clear_prev_results:
        raise UserError(
            "force_clear_prev_results is True, but earlier results are never deleted: use another "
            "results_folder, or leave force_clear_prev_results out to resume."
        )

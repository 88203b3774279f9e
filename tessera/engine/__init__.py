"""The training engine, independent of tasks, models and data, and its public names.

A task of your own needs only these names; docs/your-own-task.md explains them. They are imported on
first use, so that reading a run directory imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera.engine.config import EngineConfig as EngineConfig
    from tessera.engine.ema import EMAConfig as EMAConfig
    from tessera.engine.engine import Engine as Engine
    from tessera.engine.loss_task import LossTask as LossTask
    from tessera.engine.optim.config import OptimizerConfig as OptimizerConfig
    from tessera.engine.task import Alarm as Alarm
    from tessera.engine.task import Batch as Batch
    from tessera.engine.task import BestMetric as BestMetric
    from tessera.engine.task import Frozen as Frozen
    from tessera.engine.task import Loss as Loss
    from tessera.engine.task import ProcessGroup as ProcessGroup
    from tessera.engine.task import Rows as Rows
    from tessera.engine.task import Source as Source
    from tessera.engine.task import Task as Task
    from tessera.engine.task import TaskConfig as TaskConfig
    from tessera.engine.task import TensorExamples as TensorExamples
    from tessera.engine.task import Update as Update
    from tessera.run.fit import fit as fit
    from tessera.run.fit import load_weights as load_weights

_MODULES = {
    "Alarm": "tessera.engine.task",
    "Batch": "tessera.engine.task",
    "BestMetric": "tessera.engine.task",
    "EMAConfig": "tessera.engine.ema",
    "Engine": "tessera.engine.engine",
    "EngineConfig": "tessera.engine.config",
    "Frozen": "tessera.engine.task",
    "Loss": "tessera.engine.task",
    "LossTask": "tessera.engine.loss_task",
    "OptimizerConfig": "tessera.engine.optim.config",
    "ProcessGroup": "tessera.engine.task",
    "Rows": "tessera.engine.task",
    "Source": "tessera.engine.task",
    "Task": "tessera.engine.task",
    "TaskConfig": "tessera.engine.task",
    "TensorExamples": "tessera.engine.task",
    "Update": "tessera.engine.task",
    "fit": "tessera.run.fit",
    "load_weights": "tessera.run.fit",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'tessera.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__

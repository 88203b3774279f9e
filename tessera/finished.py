"""A run that can be put to use: its task with the weights of its newest complete checkpoint. The folder is all it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tessera import recipes
from tessera.config import Run
from tessera.engine import checkpoint
from tessera.engine.processes import Processes
from tessera.engine.task import Task
from tessera.folder import Refused, RunFolder

Weights = Literal["average", "live"]
"""The moving average of the model, or the model as the optimizer left it."""


@dataclass
class Finished:
    run: Run
    task: Task
    steps: int
    """How far it was trained."""
    weights: Weights
    meeting: Processes
    notices: list[str]
    """What a person should hear about how it was found."""


def finished(path: str | Path, weights: Weights = "average") -> Finished:
    """The run in a folder, or a letter if there is none or it was never trained."""
    folder = RunFolder(path)
    run = recipes.stored(folder)
    notices: list[str] = []
    found = checkpoint.newest(folder.checkpoints, notices.append)
    if found is None:
        raise Refused(f"The run in {path} was never trained: it has no checkpoint. `tessera train` it first.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = run.build_task().to(device).eval()
    file = "average" if weights == "average" else "model"
    checkpoint.restore_network(task.model, checkpoint.tensors_in(found / f"{file}.safetensors"), f"{weights} model in {found}")
    return Finished(run, task, int(found.name), weights, Processes(device=device), notices)

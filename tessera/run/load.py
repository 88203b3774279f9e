"""Load a trained run: a task with the weights of its newest complete checkpoint.

A run may depend on others, for example on its tokenizer. Copies of them are in the run directory
under `dependencies/`, as runs that can be used but not resumed (`dependencies.py` creates them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from tessera.engine import checkpoint
from tessera.engine.distributed import Distributed
from tessera.engine.task import Task
from tessera.recipes.registry import read_run
from tessera.run.config import Run
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from tessera.api.tokenizer import Tokenizer

Weights = Literal["ema", "raw"]
"""The exponential moving average of the weights, or the weights as the optimizer left them."""


@dataclass
class TrainedRun:
    directory: RunDirectory
    run: Run
    task: Task
    steps: int
    """The step of the checkpoint."""
    weights: Weights
    dist: Distributed
    notices: list[str] = field(default_factory=list)
    """Remarks about the checkpoint for the user."""


def load_run(path: str | Path, weights: Weights = "ema") -> TrainedRun:
    """Load the run in a folder; raise UserError if there is none or it was never trained."""
    directory = RunDirectory(path)
    run = read_run(directory)
    notices: list[str] = []
    found = checkpoint.find_newest(directory.checkpoints, notices.append)
    if found is None:
        raise UserError(
            f"The run in {path} has no checkpoint: train it first with `tessera train`."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = run.build_task(load_dependencies(directory, run)).to(device).eval()
    file = found / ("ema.safetensors" if weights == "ema" else "model.safetensors")
    source = f"{weights} weights in {found}"
    checkpoint.load_strictly(task.model, checkpoint.read_tensors(file), source)
    dist = Distributed(device=device)
    return TrainedRun(directory, run, task, int(found.name), weights, dist, notices)


def load_dependencies(directory: RunDirectory, run: Run) -> dict[str, Tokenizer]:
    """Load the tokenizers of a run from its own directory."""
    return {
        name: tokenizer_for(load_run(directory.dependencies / name), name, run)
        for name in run.task.dependencies()
    }


def tokenizer_for(trained: TrainedRun, name: str, run: Run) -> Tokenizer:
    """Return a tokenizer for the examples of a run; low-resolution images keep their own size."""
    from tessera.api.tokenizer import Tokenizer

    return Tokenizer(trained, trained.run.data if name == "low_res_tokenizer" else run.data)

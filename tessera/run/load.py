"""Load a trained run: a task with the weights of its newest complete checkpoint.

A run may depend on others, for example on its tokenizer. Copies of them are in the run directory
under `dependencies/`, as runs that can be used but not resumed (`dependencies.py` creates them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import SafetensorError, safe_open

import tessera.engine.checkpoint as checkpoint
from tessera.engine.distributed import Distributed
from tessera.engine.task import Task
from tessera.recipes.registry import read_run
from tessera.run.config import Run
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from tessera.api.tokenizer import Tokenizer

EXPORTED = "model.safetensors"
"""The weights of a run that was exported (`export.py`), beside its config.json."""
Weights = Literal["ema", "raw"]
"""The exponential moving average of the weights, or the weights as the optimizer left them."""
WEIGHTS_FILES: dict[Weights, str] = {"ema": "ema.safetensors", "raw": "model.safetensors"}
"""The file of each of them in a checkpoint."""


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
    """Remarks for the user about the checkpoint and those of the tokenizers."""


def format_repr(item: object, trained: TrainedRun, settings: Mapping[str, object]) -> str:
    """Return the repr of an object that uses a run: its class, folder and some settings."""
    shown = "".join(f", {name}={value!r}" for name, value in settings.items())
    return f"{type(item).__name__}({str(trained.directory.path)!r}{shown})"


LoadedRuns = dict[tuple[Path, Weights, str, int], TrainedRun]
"""Runs in memory by path, weights, and name and modification time of the checkpoint."""

_LOADED: ContextVar[LoadedRuns | None] = ContextVar("loaded_runs", default=None)


@contextmanager
def keep_loaded(runs: LoadedRuns) -> Iterator[None]:
    """Take runs from `runs` instead of loading them twice, and add those that are loaded."""
    token = _LOADED.set(runs)
    try:
        yield
    finally:
        _LOADED.reset(token)


def load_run(path: str | Path, weights: Weights = "ema") -> TrainedRun:
    """Load the run in a folder; raise UserError if there is none or it was never trained."""
    loaded = _LOADED.get()
    newest = max(RunDirectory(path).checkpoints.glob("[0-9]*/manifest.json"), default=None)
    if loaded is None or newest is None:
        return read_trained(path, weights)
    try:
        modified = newest.stat().st_mtime_ns
    except FileNotFoundError:  # pruned by a run that is training
        return read_trained(path, weights)
    key = (Path(path).resolve(), weights, newest.parent.name, modified)
    if key not in loaded:
        loaded[key] = read_trained(path, weights)
    return loaded[key]


def read_trained(path: str | Path, weights: Weights) -> TrainedRun:
    if weights not in WEIGHTS_FILES:
        names = ", ".join(map(repr, WEIGHTS_FILES))
        raise UserError(f"weights must be one of {names}, got {weights!r}.")
    directory = RunDirectory(path)
    run = read_run(directory)
    notices: list[str] = []
    found = find_weights(directory, weights, notices.append)
    if found is None:
        raise UserError(
            f"The run in {path} has no checkpoint: train it first with `tessera train`."
        )
    steps = found.step
    if steps < run.engine.steps and found.source.name != EXPORTED:
        progress = f"was trained for {steps:,} of {run.engine.steps:,} steps"
        notices.append(
            f"The run in {path} {progress}: `tessera train {run.recipe}` can resume it."
            if any(found.source.parent.glob("optimizer.*"))
            else f"The copy of a run in {path} {progress}."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dependencies = load_dependencies(directory, run)
    notices += [line for one in dependencies.values() for line in one.trained.notices]
    try:
        task = run.build_task(dependencies).to(device).eval()
    except UserError:
        raise
    except Exception as error:  # settings of a damaged file, such as a width of -1
        raise UserError(
            f"The settings in {directory.config} cannot be used ({type(error).__name__}: {error})."
        ) from error
    best = find_best(directory, task) if run.task.load_best else None
    if best is not None and best != found.source.parent:
        with suppress(FileNotFoundError):  # pruned by a run that is training: keep the newest
            file = best / WEIGHTS_FILES[weights]
            tensors = checkpoint.read_tensors(file)
            found = checkpoint.LoadedTensors(int(best.name), file, tensors)
            notices.append(
                f"Step {found.step:,} of {steps:,} is used, which has the best "
                f"{task.best_metric.name} on held-out examples."
            )
    source = f"{weights} weights in {found.source.parent}"
    checkpoint.load_strictly(task.model, found.tensors, source)
    dist = Distributed(device=device)
    return TrainedRun(directory, run, task, found.step, weights, dist, notices)


def find_weights(
    directory: RunDirectory, weights: Weights, warn: Callable[[str], None]
) -> checkpoint.LoadedTensors | None:
    """Read the weights of an export, or of the newest complete checkpoint of a run."""
    exported = directory.path / EXPORTED
    if not exported.is_file():
        return checkpoint.load_newest(directory.checkpoints, WEIGHTS_FILES[weights], warn)
    if weights != "ema":
        raise UserError(f"{directory.path} is an export, which has the EMA weights only.")
    return checkpoint.LoadedTensors(
        read_step(exported), exported, checkpoint.read_tensors(exported)
    )


def read_step(file: Path) -> int:
    """Return the step in the metadata of a weights file; 0 if it has none."""
    try:
        with safe_open(file, "pt") as opened:
            step = (opened.metadata() or {}).get("step", "0")
    except SafetensorError as error:
        raise UserError(f"{file} is not a readable safetensors file: {error}.") from None
    return int(step) if step.isascii() and step.isdigit() else 0


def find_best(directory: RunDirectory, task: Task) -> Path | None:
    """Return the best checkpoint of a run, if it was validated."""
    if not directory.metrics.exists():
        return None
    metric, steps = task.best_metric, checkpoint.list_steps(directory.checkpoints)
    complete = [
        step
        for step in steps
        if checkpoint.find_corruption(directory.checkpoints / checkpoint.step_name(step)) is None
    ]
    records = directory.read_records("validation")
    best = checkpoint.best_step(complete, records, metric.name, metric.higher_is_better)
    return None if best is None else directory.checkpoints / checkpoint.step_name(best)


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

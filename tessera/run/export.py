"""Export a run: what using it needs, and nothing else.

    config.json         the settings, with names in place of paths of this computer
    model.safetensors   the EMA weights
    dependencies/       the same for each tokenizer of a generator
    classes.json        the class names of a run on named folders
    README.md           the model card: how it was trained, its metrics, and how to use it
    sample.png          samples of the run

The folder is loaded like a run directory, but cannot be resumed.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from safetensors.torch import save_file

import tessera.engine.checkpoint as checkpoint
from tessera import __version__
from tessera.run.config import Run, encode
from tessera.run.directory import (
    CLASSES,
    PARTIAL,
    VERSION,
    Json,
    RunDirectory,
    is_evaluation,
    read_json,
    replacing_file,
    write_atomically,
)
from tessera.run.errors import UserError
from tessera.run.load import EXPORTED, TrainedRun, load_run
from tessera.run.train import CARD_MARK, Results, read_results

SAMPLE_SUFFIXES = (".png", ".gif")
REPOSITORY = "USER/NAME"
"""What the card has in place of the name on the hub."""


def export_run(trained: TrainedRun, out: Path) -> Path:
    """Write an export to a new folder, which appears when it is complete."""
    if trained.weights != "ema":
        raise UserError("An export has the EMA weights: load the run without weights='raw'.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: give a new folder as --out.")
    temporary = out.with_name(f".{out.name}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write_model(trained, temporary)
        sample = copy_sample(trained.directory, temporary)
        write_atomically(temporary / "README.md", build_card(trained, out.name, sample))
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def write_model(trained: TrainedRun, folder: Path) -> None:
    """Write the settings and weights of a run, and those of the runs that it depends on."""
    directory = RunDirectory(folder)
    directory.write_config(encode(without_paths(trained.run)) | {VERSION: __version__})
    tensors = checkpoint.stage(trained.task.model.state_dict())
    with replacing_file(folder / EXPORTED) as temporary:
        save_file(tensors, temporary, metadata={"step": str(trained.steps), "format": "pt"})
    classes = trained.directory.path / CLASSES
    if classes.is_file():
        shutil.copyfile(classes, folder / CLASSES)
    for name in list_parts(trained.run):
        part = directory.dependencies / name
        part.mkdir(parents=True)
        write_model(load_run(trained.directory.dependencies / name), part)


def list_parts(run: Run) -> list[str]:
    """Return the names of the runs that a run needs to be used."""
    return [*run.task.dependencies(), *run.task.companions()]


def without_paths(run: Run) -> Run:
    """Return the settings for inference; paths of this computer become names."""
    task = run.task.for_inference()
    parts = {name: f"dependencies/{name}" for name in list_parts(run)}
    if "tokens" in {field.name for field in dataclasses.fields(task)}:
        parts["tokens"] = "cache"
    path = run.data.path
    data = dataclasses.replace(run.data, path=None if path is None else Path(path).name or path)
    engine = dataclasses.replace(run.engine, init_from=None)
    task = dataclasses.replace(task, **parts)
    return dataclasses.replace(run, task=task, data=data, engine=engine)


# ---- the card


def copy_sample(directory: RunDirectory, folder: Path) -> str | None:
    """Copy the contact sheet of the last samples, or that of an export; return its name."""
    sheets = sorted(directory.samples.glob("[0-9]*/sheet.*"))
    shown = [path for path in sheets if path.suffix in SAMPLE_SUFFIXES]
    shown += [path for path in directory.path.glob("sample.*") if path.suffix in SAMPLE_SUFFIXES]
    if not shown:
        return None
    source = shown[-1]
    shutil.copyfile(source, folder / f"sample{source.suffix}")
    return f"sample{source.suffix}"


def build_card(trained: TrainedRun, name: str, sample: str | None) -> str:
    """Return the model card: the metrics are those that the run has logged, or `evaluate` found."""
    earlier = trained.directory.card
    if not trained.directory.metrics.exists() and earlier.is_file():  # of an export
        return earlier.read_text(encoding="utf-8")
    run = trained.run
    data = "synthetic data" if run.data.path is None else f"`{Path(run.data.path).name}`"
    parameters = sum(tensor.numel() for tensor in trained.task.model.parameters())
    picture = f"\n![Samples]({sample})\n" if sample else ""
    return f"""---
library_name: tessera
tags: [tessera, {run.recipe}]
---

# {name}

A model of the recipe `{run.recipe}`, {CARD_MARK} {__version__} for {trained.steps:,} steps of
{run.engine.batch_size} examples on {data}. It has {parameters:,} parameters; `config.json` holds
all settings and `{EXPORTED}` the EMA weights.
{picture}
## Metrics

{describe_metrics(trained)}

## Use

```python
from tessera import {run.task.entry_point}

model = {run.task.entry_point}.from_pretrained("{REPOSITORY}", download=True)
```

A folder works too: `{run.task.entry_point}.from_pretrained("{name}")`, and so do the commands, as
in `tessera sample {name}`.
"""


def describe_metrics(trained: TrainedRun) -> str:
    """Return tables of the held-out metrics of the exported step, and of `tessera evaluate`."""
    tables = []
    results = read_results(trained.directory, trained.steps)
    if results is not None:
        tables.append(format_results(results))
    evaluation = read_json(trained.directory.path / "evaluation.json")
    if is_evaluation(evaluation):
        assert isinstance(evaluation, dict)
        tables += format_evaluation(evaluation, trained.steps)
    return "\n\n".join(tables) or "The run was not validated."


def format_results(results: Results) -> str:
    title = f"{results.examples} held-out examples, EMA weights, step {results.step:,}:"
    return f"{title}\n\n{format_table(results.metrics)}"


def format_evaluation(evaluation: Json, step: int) -> list[str]:
    """Return a table of the metrics that `tessera evaluate` computed, if they are of this step."""
    protocol, metrics = evaluation["protocol"], evaluation["metrics"]
    if not isinstance(protocol, dict) or protocol.get("step") != step:
        return []
    values = metrics.get("ema") if isinstance(metrics, dict) else None
    if not isinstance(values, dict):
        return []
    title = f"`tessera evaluate` on {protocol.get('examples')} examples, EMA weights:"
    return [f"{title}\n\n{format_table(values)}"]


def format_table(metrics: dict[str, float]) -> str:
    numbers = {name: one for name, one in metrics.items() if isinstance(one, (int, float))}
    rows = "\n".join(f"| {name} | {value:.5g} |" for name, value in numbers.items())
    return f"| metric | value |\n|---|---|\n{rows}"

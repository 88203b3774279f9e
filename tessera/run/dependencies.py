"""The finished runs that a run stands on: copied into its folder when it begins, and the same ever
after.

runs/pictures/parts/tokenizer/   config.json and one checkpoint with the averaged weights: a run
that can only be used
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from tessera.engine.checkpoint import Snapshot, stage, step_name, write_at
from tessera.engine.distributed import Distributed
from tessera.recipes.registry import default_dependency
from tessera.run.config import Run, encode
from tessera.run.directory import RunDirectory, UserError
from tessera.run.load import Tokenizer, TrainedRun, load_run, tokenizer_for


def find_dependencies(run: Run, folder: RunDirectory) -> dict[str, Tokenizer]:
    """The tokenizers this run stands on: those in its folder, or while it has none those it is told
    of. Nothing is written."""
    made = {}
    for name, path in run.task.parts().items():
        refuse_missing(folder.parts / name, path, name, run.recipe)
        made[name] = load_run(folder.parts / name if (folder.parts / name).exists() else path)
    refuse_misfits(run, {name: Tokenizer(one) for name, one in made.items()})
    return {name: tokenizer_for(one, name, run) for name, one in made.items()}


def copy_dependencies(run: Run, folder: RunDirectory, dist: Distributed) -> None:
    """The main process copies them into the run's folder, once."""
    for name, path in run.task.parts().items():
        if not (folder.parts / name).exists():
            dist.on_main(lambda name=name, path=path: copy_part(folder.parts / name, path))  # type: ignore[misc]


def refuse_missing(place: Path, path: str, name: str, recipe: str) -> None:
    """A tokenizer that is not there, or another one than that which the run began with."""
    if not place.exists() and not (Path(path) / "config.json").exists():
        raise UserError(
            f"There is no tokenizer in {path}. Train one first (`tessera train {default_dependency(recipe, name)}`), or say where one is: "
            f"--{name} RUN"
        )
    if place.exists() and Path(path).exists() and not same(place, Path(path)):
        raise UserError(
            f"This run began with the tokenizer that is copied in {place}; the one in {path} is another one, or was trained on "
            f"since. Its symbols would mean something else. Give another --out, or go on with the copy: --{name} {place}"
        )


def copy_part(place: Path, path: str) -> None:
    made = load_run(path)
    Tokenizer(made)  # or a letter: what is no tokenizer cannot be stood on
    publish(made, place)


def publish(made: TrainedRun, place: Path) -> None:
    """A finished run as one that can be used but not gone on with."""
    run = dataclasses.replace(made.run, task=made.run.task.for_inference())
    writing = place.with_name(f".{place.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    RunDirectory(writing).write_config(encode(run))
    weights = {"ema": stage(made.task.model.state_dict())}
    write_at(
        RunDirectory(writing).checkpoints / step_name(made.steps), Snapshot(made.steps, weights, {})
    )
    os.replace(writing, place)


def same(place: Path, path: Path) -> bool:
    return (
        place.resolve() == path.resolve()
        or Tokenizer(load_run(place)).fingerprint == Tokenizer(load_run(path)).fingerprint
    )


def refuse_misfits(run: Run, parts: dict[str, Tokenizer]) -> None:
    """The run prepares its examples as its tokenizer learnt to see them."""
    for name, codec in parts.items():
        asked, known = run.data.preprocessing(), codec.preprocessing
        if name != "smaller" and asked != known:
            raise UserError(
                f"The tokenizer in {run.task.parts()[name]} was trained on examples prepared as {known}, but this run prepares "
                f"them as {asked}. Use the same ({', '.join(f'--data.{key} {value}' for key, value in known.items())}), or "
                "another tokenizer."
            )

"""The finished runs that a run stands on: copied into its folder when it begins, and the same ever after.

    runs/pictures/parts/tokenizer/   config.json and one checkpoint with the averaged weights: a run that can only be used
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from tessera.engine.checkpoint import Snapshot, name_of, staged, write_at
from tessera.engine.distributed import Processes
from tessera.recipes.registry import beneath
from tessera.run.config import Run, encode
from tessera.run.directory import Refused, RunFolder
from tessera.run.load import Codec, Finished, codec_of, finished


def find_parts(run: Run, folder: RunFolder) -> dict[str, Codec]:
    """The tokenizers this run stands on: those in its folder, or while it has none those it is told of. Nothing is written."""
    made = {}
    for name, path in run.task.parts().items():
        refuse_missing(folder.parts / name, path, name, run.recipe)
        made[name] = finished(folder.parts / name if (folder.parts / name).exists() else path)
    refuse_misfits(run, {name: Codec(one) for name, one in made.items()})
    return {name: codec_of(one, name, run) for name, one in made.items()}


def keep_parts(run: Run, folder: RunFolder, meeting: Processes) -> None:
    """The main process copies them into the run's folder, once."""
    for name, path in run.task.parts().items():
        if not (folder.parts / name).exists():
            meeting.main_does(lambda name=name, path=path: copy_part(folder.parts / name, path))  # type: ignore[misc]


def refuse_missing(place: Path, path: str, name: str, recipe: str) -> None:
    """A tokenizer that is not there, or another one than that which the run began with."""
    if not place.exists() and not (Path(path) / "config.json").exists():
        raise Refused(
            f"There is no tokenizer in {path}. Train one first (`tessera train {beneath(recipe, name)}`), or say where one is: "
            f"--{name} RUN"
        )
    if place.exists() and Path(path).exists() and not same(place, Path(path)):
        raise Refused(
            f"This run began with the tokenizer that is copied in {place}; the one in {path} is another one, or was trained on "
            f"since. Its symbols would mean something else. Give another --out, or go on with the copy: --{name} {place}"
        )


def copy_part(place: Path, path: str) -> None:
    made = finished(path)
    Codec(made)  # or a letter: what is no tokenizer cannot be stood on
    publish(made, place)


def publish(made: Finished, place: Path) -> None:
    """A finished run as one that can be used but not gone on with."""
    run = dataclasses.replace(made.run, task=made.run.task.published())
    writing = place.with_name(f".{place.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    RunFolder(writing).write_config(encode(run))
    weights = {"average": staged(made.task.model.state_dict())}
    write_at(RunFolder(writing).checkpoints / name_of(made.steps), Snapshot(made.steps, weights, {}))
    os.replace(writing, place)


def same(place: Path, path: Path) -> bool:
    return place.resolve() == path.resolve() or Codec(finished(place)).fingerprint == Codec(finished(path)).fingerprint


def refuse_misfits(run: Run, parts: dict[str, Codec]) -> None:
    """The run prepares its examples as its tokenizer learnt to see them."""
    for name, codec in parts.items():
        asked, known = run.data.transform(), codec.transform
        if name != "smaller" and asked != known:
            raise Refused(
                f"The tokenizer in {run.task.parts()[name]} was trained on examples prepared as {known}, but this run prepares "
                f"them as {asked}. Use the same ({', '.join(f'--data.{key} {value}' for key, value in known.items())}), or "
                "another tokenizer."
            )

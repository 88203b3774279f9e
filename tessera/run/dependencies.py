"""The trained runs that a run depends on: copied into its directory when it starts.

runs/images-maskgit/dependencies/tokenizer/   config.json and a checkpoint with the EMA weights
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tessera.api.tokenizer import Tokenizer
from tessera.engine.checkpoint import Snapshot, stage, step_name, write_to
from tessera.engine.distributed import Distributed
from tessera.recipes.registry import default_dependency
from tessera.run.config import Run, encode
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError, as_user_error
from tessera.run.load import TrainedRun, load_run, tokenizer_for
from tessera.run.resolve import format_flags


def find_dependencies(run: Run, directory: RunDirectory) -> dict[str, Tokenizer]:
    """Load the tokenizers of a run from its directory, or from their paths if it has none yet."""
    found = {}
    for name, path in run.task.dependencies().items():
        copy = directory.dependencies / name
        check_dependency(copy, Path(path), name, run.recipe)
        trained = load_run(copy if copy.exists() else path)
        with as_user_error(ValueError):
            run.task.validate_dependency(name, trained.run.data)
        check_preprocessing(run, Tokenizer(trained), name)
        found[name] = tokenizer_for(trained, name, run)
    return found


def check_dependency(copy: Path, path: Path, name: str, recipe: str) -> None:
    """Raise UserError if the run is missing, or if it changed since it was copied."""
    flag = name.replace("_", "-")
    if not copy.exists() and not (path / "config.json").exists():
        raise UserError(
            f"There is no tokenizer in {path}. Train one first (`tessera train "
            f"{default_dependency(recipe, name)}`), or give the path of one: --{flag} RUN"
        )
    is_elsewhere = copy.exists() and path.exists() and copy.resolve() != path.resolve()
    if is_elsewhere and Tokenizer.load(copy).fingerprint != Tokenizer.load(path).fingerprint:
        raise UserError(
            f"This run was started with the tokenizer that is copied in {copy}; the one in {path} "
            "is another one or was trained further, and its codes differ. Give another --out, or "
            f"resume with the copy: --{flag} {copy}"
        )


def check_preprocessing(run: Run, tokenizer: Tokenizer, name: str) -> None:
    """Raise UserError unless the run preprocesses examples as its tokenizer does."""
    own, trained = run.data, tokenizer.run.data
    requested, expected = own.preprocessing(), trained.preprocessing()
    if name == "low_res_tokenizer" or requested == expected:
        return
    path, flag = run.task.dependencies()[name], name.replace("_", "-")
    names = list(expected | requested)
    if not all(hasattr(data, setting) for data in (own, trained) for setting in names):
        raise UserError(
            f"The tokenizer in {path} was trained on {trained.noun}, but this run is trained on "
            f"{own.noun}: give a tokenizer of {own.noun} (--{flag} RUN)."
        )
    differing = [one for one in names if getattr(trained, one) != getattr(own, one)]
    needed = {setting: getattr(trained, setting) for setting in differing}
    found = {setting: getattr(own, setting) for setting in differing}
    raise UserError(
        f"The tokenizer in {path} was trained on examples with {list_settings(needed)}, but this "
        f"run has {list_settings(found)}: use {format_flags(needed)}, or another tokenizer "
        f"(--{flag} RUN)."
    )


def list_settings(settings: Mapping[str, object]) -> str:
    return " and ".join(f"{name} {value}" for name, value in settings.items())


def copy_dependencies(run: Run, directory: RunDirectory, dist: Distributed) -> None:
    """Copy the runs into the run directory on the main process, once."""
    for name, path in run.task.dependencies().items():
        copy = directory.dependencies / name
        if not copy.exists():
            dist.on_main(partial(copy_dependency, copy, path))


def check_companions(run: Run, directory: RunDirectory) -> None:
    """Raise UserError if a run that is to be copied is missing or has other tokenizers."""
    for name, path in run.task.companions().items():
        if (directory.dependencies / name).exists():
            continue
        flag = name.replace("_", "-")
        if not (Path(path) / "config.json").exists():
            raise UserError(
                f"There is no run in {path}. Train it first (`tessera train "
                f"{default_dependency(run.recipe, name)}`), give the path of one (--{flag} RUN), "
                f"or train without (--{flag} none)."
            )
        own = Tokenizer.load(run.task.dependencies()["tokenizer"]).fingerprint
        theirs = [Tokenizer.load(one) for one in RunDirectory(path).dependencies.iterdir()]
        if own not in [one.fingerprint for one in theirs]:
            raise UserError(
                f"The run in {path} was trained with other tokenizers than "
                f"{run.task.dependencies()['tokenizer']}: give one that uses the same (--{flag} "
                "RUN), or the tokenizer that it uses (--tokenizer RUN)."
            )


def copy_companions(run: Run, directory: RunDirectory, dist: Distributed) -> None:
    """Copy runs that only the use of the run needs, with their own dependencies."""
    for name, path in run.task.companions().items():
        copy = directory.dependencies / name
        if not copy.exists():
            dist.on_main(partial(copy_companion, copy, path))


def copy_companion(folder: Path, path: str) -> None:
    publish(load_run(path), folder, with_dependencies=True)


def copy_dependency(folder: Path, path: str) -> None:
    trained = load_run(path)
    Tokenizer(trained)  # raises UserError if the run is not a tokenizer
    publish(trained, folder)


def publish(trained: TrainedRun, folder: Path, *, with_dependencies: bool = False) -> None:
    """Write a run that can be used but not resumed, alone or with the runs that it depends on."""
    run = dataclasses.replace(trained.run, task=trained.run.task.for_inference())
    temporary = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    directory = RunDirectory(temporary)
    directory.write_config(encode(run))
    tensors = {"ema": stage(trained.task.model.state_dict())}
    snapshot = Snapshot(trained.steps, tensors, {})
    write_to(directory.checkpoints / step_name(trained.steps), snapshot)
    if with_dependencies:
        shutil.copytree(trained.directory.dependencies, directory.dependencies)
    os.replace(temporary, folder)

"""The commands that start runs: `recipes`, `train` and `import`."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tessera.run.directory import (
    RunDirectory,
)
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from tessera.cli.flags import TrainArguments


def list_recipes() -> int:
    """List what can be trained."""
    from tessera.recipes.registry import RECIPES, installed_recipes, recipe_name, recipe_summary

    for recipe in RECIPES:
        print(f"{recipe_name(recipe):24}{recipe_summary(recipe)}")
    for name, entry in installed_recipes().items():
        print(f"{name:24}{entry.value}")
    print("\n`tessera train RECIPE --help` shows the flags of a recipe.")
    print("Presets: tiny, small (the default), base, paper.")
    return 0


def train(*arguments: str) -> int:
    """Start a run, or resume it where it stopped."""
    if not arguments or arguments[0].startswith("-") and arguments[0] != "--config":
        raise UserError(
            "No recipe given: tessera train RECIPE [--data PATH] [--out RUN], or tessera train "
            "--config FILE; `tessera recipes` lists the recipes."
        )
    parsed = parse_config(arguments[1:]) if arguments[0] == "--config" else parse_recipe(arguments)
    from tessera.cli import launch

    if parsed.run.engine.nproc > 1 and not launch.is_launched():
        return launch.launch_processes(parsed.run.engine.nproc, ["train", *arguments])
    from tessera.run.dry_run import dry_run, print_plan
    from tessera.run.resolve import resolve_run
    from tessera.run.train import build_engine, find_unused_folder, print_header, print_summary

    if parsed.out is not None and not parsed.out.strip():
        raise UserError("--out is empty: give a folder, or leave it out.")
    out = Path(parsed.out or f"runs/{parsed.run.recipe.rpartition(':')[2]}")
    directory = RunDirectory(find_unused_folder(out) if parsed.fresh else out)
    directory.check_ownership()
    resolved = resolve_run(parsed.run, parsed.given, directory)
    run = resolved.run
    if parsed.plan_only:
        if not parsed.dry_run:
            raise UserError("--plan-only is for --dry-run: add it, or leave --plan-only out.")
        print_plan(run, parsed.preset)
        return 0
    if parsed.dry_run:
        dry_run(run)
        return 0
    with launch.forgiving_output():
        print_header(run, directory, resolved.remark)
        build_engine(run, directory, rescan=parsed.rescan).run()
        print_summary(run, directory)
    return 0


def parse_recipe(arguments: tuple[str, ...]) -> TrainArguments:
    """Parse RECIPE and its flags."""
    from tessera.recipes.registry import get_recipe

    name = arguments[0]
    if ":" in name:
        search_current_folder()
    recipe = get_recipe(name)  # before the flags, whose module imports torch
    from tessera.cli import flags

    parsed = flags.parse(recipe, list(arguments[1:]), name)
    return replace(parsed, run=replace(parsed.run, recipe=name))


def search_current_folder() -> None:
    """Let a module that the user named be imported from the current folder."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)


def parse_config(arguments: tuple[str, ...]) -> TrainArguments:
    """Parse the configuration of another run and the flags that change it."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError("--config needs a file: tessera train --config runs/NAME/config.json")
    from tessera.cli import flags
    from tessera.recipes.registry import read_run

    path = Path(arguments[0])
    directory = RunDirectory(path.parent)
    directory.config = path
    run = read_run(directory)
    return flags.parse_changes(run, list(arguments[1:]), f"tessera train --config {path}")


def import_checkpoint(
    model: str,
    file: str,
    /,
    *,
    trainer: Literal[
        "soundstorm", "mulan", "video", "vqgan", "mesh-autoencoder", "mesh-transformer"
    ],
    out: str,
    arguments: str | None = None,
) -> int:
    """Convert a checkpoint of a research package to a run directory that a trainer resumes from.

    Only tensors and numbers are read from the file; nothing in it is executed.

    Args:
        model: The function or class that builds the model, as module:name.
        file: The checkpoint that the trainer of the research package wrote.
        trainer: The trainer that wrote it.
        out: The new run directory.
        arguments: A JSON file with the arguments of the function or class.
    """
    search_current_folder()
    from tessera.recipes.registry import import_reference
    from tessera.trainers.import_checkpoint import import_checkpoint as convert

    build = import_reference(model)
    kwargs = json_module.loads(Path(arguments).read_text(encoding="utf-8")) if arguments else {}
    written = convert(trainer, build(**kwargs), Path(file), Path(out))
    print(
        f"Step {int(written.name)} of {file} is in {written}; a trainer with the folder {out} and "
        "the same model resumes from it."
    )
    return 0

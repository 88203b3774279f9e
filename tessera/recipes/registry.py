"""Recipes by name. A recipe is a function that returns a Run.

The functions import networks only when they are called, so listing recipes needs no torch.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import tessera.modalities as modalities
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from tessera.run.config import Run

RECIPES: tuple[Callable[..., Run], ...] = tuple(
    modalities.resolve(recipe.build) for recipe in modalities.recipes().values()
)
"""The recipes of the built-in modalities."""


def recipe_name(recipe: Callable[..., Run]) -> str:
    return recipe.__name__.replace("_", "-")


def recipe_summary(recipe: Callable[..., Run]) -> str:
    return (recipe.__doc__ or "").strip().splitlines()[0]


def find_recipe(name: str) -> modalities.Recipe:
    """Return the recipe of this name, or raise UserError with the closest one."""
    known = modalities.recipes()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else "`tessera recipes` lists the recipes."
    raise UserError(f"There is no recipe {name!r}: {hint}")


def get_recipe(name: str) -> Callable[..., Run]:
    return modalities.resolve(find_recipe(name).build)


def default_dependency(recipe: str, name: str) -> str:
    """Return the recipe of a dependency: images-vqgan for the `tokenizer` of images-maskgit."""
    parameters = inspect.signature(get_recipe(recipe)).parameters
    return Path(parameters[name].default).name


def read_run(directory: RunDirectory) -> Run:
    """Read config.json with the classes of the recipe's configurations."""
    from tessera.run.config import decode_run

    values = directory.read_config()
    recipe = find_recipe(str(values.get("recipe")))
    task, data = modalities.resolve(recipe.task), modalities.resolve(recipe.data)
    return decode_run(values, task, data)

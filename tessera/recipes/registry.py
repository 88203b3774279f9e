"""What can be trained: each recipe is a function that returns a Run, and its name is the command's.

The functions import their networks when they are called, so that listing them costs nothing and
needs no torch.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera import modalities
from tessera.run.directory import RunDirectory, UserError

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


def get_recipe(name: str) -> Callable[..., Run]:
    """The recipe of this name, or a letter with the nearest one."""
    known = modalities.recipes()
    if name in known:
        return modalities.resolve(known[name].build)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else "`tessera recipes` lists them."
    raise UserError(f"There is no recipe {name!r}: {hint}")


def default_dependency(recipe: str, part: str) -> str:
    """The recipe whose runs another stands on by default: its `tokenizer` is runs/images-vqgan,
    say."""
    return Path(inspect.signature(get_recipe(recipe)).parameters[part].default).name


def read_run(folder: RunDirectory) -> Run:
    """The run whose folder this is, as its config.json says."""
    from tessera.run.config import decode_run

    values: dict[str, Any] = folder.read_config()
    get_recipe(str(values.get("recipe")))
    recipe = modalities.recipes()[values["recipe"]]
    return decode_run(values, modalities.resolve(recipe.task), modalities.resolve(recipe.data))

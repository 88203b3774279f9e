"""Recipes by name. A recipe is a function that returns a Run.

The functions import networks only when they are called, so listing recipes needs no torch.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tessera.modalities as modalities
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from tessera.run.config import Run

ENTRY_POINTS = "tessera.recipes"
"""The group of entry points by which an installed package offers recipes."""

RECIPES: tuple[Callable[..., Run], ...] = tuple(
    modalities.resolve(recipe.build) for recipe in modalities.recipes().values()
)
"""The recipes of the built-in modalities."""


def recipe_name(recipe: Callable[..., Run]) -> str:
    return recipe.__name__.replace("_", "-")


def recipe_summary(recipe: Callable[..., Run]) -> str:
    return (recipe.__doc__ or "").strip().splitlines()[0]


def find_recipe(name: str) -> modalities.Recipe:
    """Return the built-in recipe of this name, or raise UserError with the closest one."""
    known = modalities.recipes()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, [*known, *installed_recipes()], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else "`tessera recipes` lists the recipes."
    raise UserError(f"There is no recipe {name!r}: {hint}")


def get_recipe(name: str) -> Callable[..., Run]:
    """Return a recipe by name: built in, of an installed package, or `module:function`."""
    if name in modalities.recipes():
        return modalities.resolve(find_recipe(name).build)
    if ":" in name:
        return check_recipe(import_reference(name), name)
    if name in installed_recipes():
        return check_recipe(installed_recipes()[name].load(), name)
    return modalities.resolve(find_recipe(name).build)


def installed_recipes() -> dict[str, EntryPoint]:
    """Return the recipes of other installed packages, which declare them as entry points."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}


def import_reference(name: str) -> Any:
    """Import what `module:name` names."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{name!r} cannot be imported: {error}. Give module:name of a module in this folder or "
            "of an installed package."
        ) from None
    if not attribute or not hasattr(module, attribute):
        raise UserError(f"The module {module_name} has no {attribute!r}: give module:name.")
    return getattr(module, attribute)


def check_recipe(recipe: Callable[..., Run], name: str) -> Callable[..., Run]:
    """Return the function if its annotation states that it returns a Run.

    config.json may name any module, so that no other function may be called because of it.
    """
    annotation = getattr(recipe, "__annotations__", {}).get("return")
    if getattr(annotation, "__name__", annotation) != "Run":
        raise UserError(
            f"{name} is no recipe: a recipe is a function that is annotated to return a Run, "
            "`def my_recipe(...) -> Run`."
        )
    return recipe


def default_dependency(recipe: str, name: str) -> str:
    """Return the recipe of a dependency: images-vqgan for the `tokenizer` of images-maskgit."""
    parameters = inspect.signature(get_recipe(recipe)).parameters
    return Path(parameters[name].default).name


def read_run(directory: RunDirectory) -> Run:
    """Read config.json with the classes of the recipe's configurations."""
    from tessera.run.config import decode_run

    values = directory.read_config()
    name = values.get("recipe")
    if name is not None and not isinstance(name, str):
        raise UserError(f"The recipe in {directory.config} must be a text, got {name!r}.")
    if name is None:
        raise UserError(
            f"The run in {directory.path} was trained from Python, on a task or a model that "
            "config.json does not describe: load its weights with tessera.engine.load_weights."
        )
    if name in modalities.recipes() or (":" not in name and name not in installed_recipes()):
        recipe = find_recipe(str(name))
        task, data = modalities.resolve(recipe.task), modalities.resolve(recipe.data)
    else:
        example = get_recipe(name)()
        task, data = type(example.task), type(example.data)
    return decode_run(values, task, data)

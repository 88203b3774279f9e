"""The flags of `tessera train`: first the recipe's choices, then the fields of the run that they
make.

Both come from annotations and docstrings, so flags, help, config.json and the Python API cannot
drift apart. The engine's fields are common to all recipes and have no prefix (`--steps`); the rest
carry theirs (`--task.model.dim`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from tessera.engine.engine import EngineConfig
from tessera.recipes.registry import recipe_name
from tessera.run.config import Run
from tessera.run.directory import UserError


@dataclass
class Asked:
    """What a person asked `tessera train` for."""

    run: Run
    out: str | None
    fresh: bool
    dry_run: bool


def parse(recipe: Callable[..., Run], arguments: list[str]) -> Asked:
    program = f"tessera train {recipe_name(recipe)}"
    wants_help = {"-h", "--help"} & set(arguments)
    given = _spelt_out([argument for argument in arguments if argument not in ("-h", "--help")])
    try:
        choices, rest = tyro.cli(
            _choices(recipe), prog=program, args=given, return_unknown_args=True
        )
        run = recipe(**dataclasses.asdict(choices))
        if wants_help:
            with contextlib.suppress(SystemExit):  # the recipe's own flags; those of its run follow
                tyro.cli(_choices(recipe), prog=program, args=["--help"])
        form = _form(run)
        asked = tyro.cli(
            form,
            prog=program,
            description="The fields of the run, with the values that the preset gives them. "
            "`--data PATH` is short for `--data.path PATH`.",
            args=["--help"] if wants_help else rest,
            default=form(engine=run.engine, task=run.task, data=run.data),
        )
        run = dataclasses.replace(run, engine=asked.engine, task=asked.task, data=asked.data)
    except ValueError as error:
        raise UserError(str(error)) from None
    return Asked(run, asked.out, asked.fresh, asked.dry_run)


def _spelt_out(arguments: list[str]) -> list[str]:
    """Everybody's `--data PATH` is the data's own field `path`, and `--log-with a,b` is two
    trackers."""
    whole: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == "--data":
            whole.append(f"--data.path{equals}{value}")
        elif name == "--log-with" and equals:
            whole += [name, *value.split(",")]
        elif whole and whole[-1] == "--log-with":
            whole += argument.split(",")
        else:
            whole.append(argument)
    return whole


def _choices(recipe: Callable[..., Run]) -> Any:
    """The recipe's parameters as a dataclass. (Recipes name Run without importing it, so tyro
    cannot read them itself.)"""
    hints = typing.get_type_hints(recipe, localns={"Run": Run})
    parameters = inspect.signature(recipe).parameters.values()
    fields = [(p.name, hints[p.name], p.default) for p in parameters]
    return dataclasses.make_dataclass("Choices", fields, namespace={"__doc__": recipe.__doc__})


def _form(run: Run) -> Any:
    """A dataclass with the types that this run really has, for tyro to make flags of."""
    switch = tyro.conf.FlagCreatePairsOff[bool]
    return dataclasses.make_dataclass(
        "Flags",
        [
            ("engine", Annotated[EngineConfig, tyro.conf.arg(name="")]),
            ("task", tyro.conf.AvoidSubcommands[type(run.task)]),
            ("data", type(run.data)),
            (
                "out",
                Annotated[
                    str | None, tyro.conf.arg(help="The run's folder. Left out: runs/RECIPE.")
                ],
                None,
            ),
            (
                "fresh",
                Annotated[
                    switch, tyro.conf.arg(help="Start anew, in a new folder beside one in use.")
                ],
                False,
            ),
            (
                "dry_run",
                Annotated[
                    switch, tyro.conf.arg(help="Show the plan, rehearse two steps, keep nothing.")
                ],
                False,
            ),
        ],
        kw_only=True,
    )

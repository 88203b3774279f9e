"""The flags of `tessera train`: the parameters of the recipe, then the fields of its run.

Both come from annotations and docstrings, so flags, help, config.json and the Python API agree. The
fields of the engine are common to all recipes and have no prefix (`--steps`); the others have one
(`--task.model.dim`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from tessera.engine.config import EngineConfig
from tessera.recipes.registry import recipe_name
from tessera.run.config import Run
from tessera.run.errors import as_user_error

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass
class TrainArguments:
    """The parsed flags of `tessera train`."""

    run: Run
    given: frozenset[str]
    """The settings that flags name, such as `data.size`."""
    out: str | None
    fresh: bool
    dry_run: bool
    rescan: bool
    plan_only: bool = False
    preset: str = "small"
    """The preset of the recipe, which is also that of tokenizers that do not exist yet."""


def parse(
    recipe: Callable[..., Run], arguments: list[str], name: str | None = None
) -> TrainArguments:
    program = f"tessera train {name or recipe_name(recipe)}"
    wants_help = {"-h", "--help"} & set(arguments)
    given = expand_short_flags([one for one in arguments if one not in ("-h", "--help")])
    choices = choices_class(recipe)
    with as_user_error(ValueError):
        chosen, rest = tyro.cli(choices, prog=program, args=given, return_unknown_args=True)
        run = recipe(**dataclasses.asdict(chosen))
        if wants_help:
            with contextlib.suppress(SystemExit):  # the recipe's flags; those of its run follow
                tyro.cli(choices, prog=program, args=["--help"])
        parsed = parse_settings(run, ["--help"] if wants_help else rest, program)
        preset = getattr(chosen, "preset", parsed.preset)
        return dataclasses.replace(parsed, preset=preset)


def parse_changes(run: Run, arguments: list[str], program: str) -> TrainArguments:
    """Parse flags that change the settings of a given run, all of which count as given."""
    with as_user_error(ValueError):
        parsed = parse_settings(run, expand_short_flags(arguments), program)
    given = {f"data.{field.name}" for field in dataclasses.fields(run.data)}
    return dataclasses.replace(parsed, given=parsed.given | given)


def parse_settings(run: Run, arguments: list[str], program: str) -> TrainArguments:
    form = run_class(run)
    parsed = tyro.cli(
        form,
        prog=program,
        description="The settings of the run, with the values of the preset. `--data PATH` is "
        "short for `--data.path PATH`.",
        args=arguments,
        default=form(engine=run.engine, task=run.task, data=run.data),
    )
    task = parsed.task.fit_data(parsed.data)
    run = dataclasses.replace(run, engine=parsed.engine, task=task, data=parsed.data)
    given = named_settings(arguments)
    return TrainArguments(
        run,
        given,
        parsed.out,
        parsed.fresh,
        parsed.dry_run,
        parsed.rescan,
        plan_only=parsed.plan_only,
    )


def named_settings(arguments: list[str]) -> frozenset[str]:
    """Return `data.val_fraction` for `--data.val-fraction 0.1` or `--data.val-fraction=0.1`."""
    names = [one.partition("=")[0] for one in arguments if one.startswith("--")]
    return frozenset(name.removeprefix("--").replace("-", "_") for name in names)


def expand_short_flags(arguments: list[str]) -> list[str]:
    """Expand `--data PATH` to `--data.path PATH`, and `--log-with a,b` to two trackers."""
    expanded: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name == "--data":
            expanded.append(f"--data.path{equals}{value}")
        elif name == "--log-with" and equals:
            expanded += [name, *value.split(",")]
        elif expanded and expanded[-1] == "--log-with":
            expanded += argument.split(",")
        else:
            expanded.append(argument)
    return expanded


def choices_class(recipe: Callable[..., Run]) -> type[DataclassInstance]:
    """Return the recipe's parameters as a dataclass.

    Recipes annotate `Run` without importing it, so tyro cannot read them itself.
    """
    hints = typing.get_type_hints(recipe, localns={"Run": Run})
    parameters = inspect.signature(recipe).parameters.values()
    fields = [(p.name, hints[p.name], p.default) for p in parameters]
    return dataclasses.make_dataclass("Choices", fields, namespace={"__doc__": recipe.__doc__})


def run_class(run: Run) -> type:
    """Return a dataclass with the types that the fields of this run have."""
    task_type = type(run.task)
    switch = tyro.conf.FlagCreatePairsOff[bool]
    out_help = "The run directory; by default runs/RECIPE."
    fresh_help = "Start a new run in a new folder beside one that is in use."
    rescan = "List the files again, and use those that were added since the run was started."
    dry_run_help = "Print the plan, try two steps, and keep nothing."
    plan_help = "With --dry-run: print parameters, memory and FLOPs of a step, and try nothing."
    return dataclasses.make_dataclass(
        "Flags",
        [
            ("engine", Annotated[EngineConfig, tyro.conf.arg(name="")]),
            ("task", tyro.conf.AvoidSubcommands[task_type]),  # type: ignore[valid-type, misc]
            ("data", type(run.data)),
            ("out", Annotated[str | None, tyro.conf.arg(help=out_help)], None),
            ("fresh", Annotated[switch, tyro.conf.arg(help=fresh_help)], False),
            ("dry_run", Annotated[switch, tyro.conf.arg(help=dry_run_help)], False),
            ("plan_only", Annotated[switch, tyro.conf.arg(help=plan_help)], False),
            ("rescan", Annotated[switch, tyro.conf.arg(name="data.rescan", help=rescan)], False),
        ],
        kw_only=True,
    )

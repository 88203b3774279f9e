"""Settings of the data that a command leaves out.

A run that has started has them in its directory, a generator takes those of its tokenizer, and for
a folder of files the data configuration proposes them. They are resolved before anything is
written, so config.json has the values that are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tessera.recipes.registry import read_run
from tessera.run.config import Run
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import as_user_error


@dataclass(frozen=True)
class ResolvedRun:
    run: Run
    remark: str = ""
    """Which settings were chosen and why, in a sentence; "" if none were."""


def resolve_run(run: Run, given: Collection[str], directory: RunDirectory) -> ResolvedRun:
    """Choose the settings of the data that are not among those `given`, such as `data.size`."""
    tokenizer = run.task.dependencies().get("tokenizer")
    names = run.data.proposes if tokenizer is None else tuple(run.data.inherited())
    missing = [name for name in names if f"data.{name}" not in given]
    if not missing:
        return ResolvedRun(run)
    if directory.config.exists() and directory.has_started:
        stored: Mapping[str, object] = directory.read_config().get("data", {})
        return with_settings(run, stored, missing, "")
    if tokenizer is not None:
        source = RunDirectory(tokenizer)
        if not source.config.exists():  # an error that names the recipe to train follows
            return ResolvedRun(run)
        return with_settings(
            run, read_run(source).data.inherited(), missing, "As the tokenizer was trained"
        )
    proposal = run.data.propose(run.task) if run.data.path is not None else None
    if proposal is None:
        return ResolvedRun(run)
    return with_settings(run, proposal.settings, missing, proposal.reason)


def with_settings(
    run: Run, settings: Mapping[str, object], missing: Collection[str], reason: str
) -> ResolvedRun:
    """Return a run with some settings of the data, and the sentence that lists them."""
    chosen: Json = {name: settings[name] for name in missing if name in settings}
    with as_user_error(ValueError, TypeError):
        data = dataclasses.replace(run.data, **chosen)
        resolved = dataclasses.replace(run, data=data, task=run.task.fit_data(data))
    remark = f"{reason}: {format_flags(chosen)}." if reason and chosen else ""
    return ResolvedRun(resolved, remark)


def format_flags(settings: Mapping[str, object]) -> str:
    """Return settings of the data as flags of the command line."""
    return " ".join(f"--data.{name.replace('_', '-')} {value}" for name, value in settings.items())

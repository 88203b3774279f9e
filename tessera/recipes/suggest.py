"""The commands that train on a folder, as `tessera check` suggests them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tessera.modalities as modalities
from tessera.data.inspect import Report
from tessera.run.config import Run

MIN_EPOCHS = 20
"""The number of times that a suggested run reads every example, unless that takes too long."""

MAX_LONGER = 8
"""The largest factor by which a suggested run is longer than its preset."""


@dataclass(frozen=True)
class Suggestions:
    commands: list[str]
    """Commands that train the stages of a modality one after the other."""
    remarks: list[str]
    """What the commands do with captions, and without, in sentences."""


def suggest_commands(
    report: Report,
    modality: modalities.Modality,
    columns: Sequence[str] = (),
    group_by: str | None = None,
) -> Suggestions:
    """Return the commands that train on a folder.

    With `group_by`, they hold out these groups.
    """
    suggestions = Suggestions([], [])
    name = re.sub(r"[{}*?:]", "", Path(report.path).resolve().stem)
    runs: dict[str, str] = {}
    """The suggested run directory of each recipe."""
    for recipe in modality.recipes:
        if not is_suggested(recipe, report):
            continue
        choices = dict(recipe.caption_flags) if report.has_texts else {}
        run: Run = modalities.resolve(recipe.build)(**choices)
        runs[recipe.name] = f"runs/{name}-{recipe.name.partition('-')[2]}"
        flags: dict[str, object] = {**choices, "data": report.path}
        for dependency, path in (run.task.dependencies() | run.task.companions()).items():
            flags[dependency.replace("_", "-")] = runs.get(Path(path).name, path)
        if run.task.uses_captions and not report.captioned:
            flags["text"] = "none"
        examples = (
            report.captioned if run.task.uses_captions and report.captioned else report.usable
        )
        if group_by is not None:
            flags["data.group-by"] = group_by
        flags |= proposed_flags(report, run)
        flags["steps"] = suggest_steps(run, examples)
        flags["out"] = runs[recipe.name]
        named = f" --data.columns {shlex.join(columns)}" if columns else ""
        suggestions.commands.append(f"tessera train {recipe.name} {format_flags(flags)}{named}")
        suggestions.remarks.extend(f"{recipe.name}: {one}" for one in caption_remarks(report, run))
        if recipe.suggested == "captioned":
            suggestions.remarks.insert(0, f"The captions must be {recipe.captions_are}.")
    return suggestions


def is_suggested(recipe: modalities.Recipe, report: Report) -> bool:
    if recipe.suggested == "captioned":
        return report.has_texts
    return bool(report.usable) and recipe.suggested == "always"


def caption_remarks(report: Report, run: Run) -> list[str]:
    """Return what becomes of files without a caption, if only some have none."""
    missing = report.usable - report.captioned
    if not run.task.uses_captions or not missing or not report.captioned:
        return []
    remark = run.task.describe_missing_captions(missing, report.usable)
    return [remark] if remark else []


def proposed_flags(report: Report, run: Run) -> dict[str, object]:
    """Return the settings that the folder needs and the preset does not have."""
    if run.task.dependencies():  # a generator takes them from its tokenizer
        return {}
    proposal = report.propose(run.data, run.task)
    if proposal is None:
        return {}
    return {f"data.{name.replace('_', '-')}": value for name, value in proposal.settings.items()}


def suggest_steps(run: Run, examples: int) -> int:
    """Return the preset's steps, or more for a large folder, rounded to its checkpoints."""
    engine = run.engine
    wanted = examples * MIN_EPOCHS / engine.batch_size
    steps = min(max(wanted, engine.steps), engine.steps * MAX_LONGER)
    return max(engine.steps, round(steps / engine.checkpoint_every) * engine.checkpoint_every)


def format_flags(flags: Mapping[str, object]) -> str:
    return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in flags.items())

"""Describe run directories without torch: a row of the table, and the page of one run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tessera import modalities
from tessera.recipes.registry import find_recipe
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import UserError
from tessera.view.metrics import LastRecords, MetricsFile, read_last

State = Literal["training", "done", "stopped", "problem"]
Kind = Literal["tokenizer", "generator", "embedding"]


@dataclass(frozen=True)
class RunInfo:
    """What config.json says about a run."""

    recipe: str
    modality: str
    kind: Kind
    metric: str
    """The validation metric that is shown first."""
    data: str
    steps: int
    batch_size: int
    dependencies: dict[str, str]
    """Name -> path of a run that this one depends on, as it was given when the run started."""


@dataclass(frozen=True)
class Summary:
    """One row of the table of runs."""

    id: str
    path: str
    state: State
    reason: str = ""
    """Why the run has a problem."""
    info: RunInfo | None = None
    step: int = 0
    value: float | None = None
    """The validation metric of the EMA weights."""
    loss: str = ""
    spark: list[float] = field(default_factory=list)
    alarm: Json | None = None
    """The last alarm, with its step."""
    steps_per_second: float | None = None
    seconds_left: float | None = None
    can_sample: bool = False
    """Whether there is a complete checkpoint."""
    modified: float = 0.0
    """When the metrics were last written, in seconds since 1970."""
    depends_on: dict[str, str] = field(default_factory=dict)
    """Name -> id of a run in the same table."""

    def as_json(self) -> Json:
        return asdict(self)


@dataclass
class FoundRun:
    """A run directory, with what was read of it so far."""

    id: str
    directory: RunDirectory
    reason: str = ""
    """Why the folder is not a usable run; "" if it is one."""
    metrics: MetricsFile = field(init=False)
    _last: tuple[tuple[int, int, int], LastRecords] | None = None
    _info: tuple[int, RunInfo | str] | None = None

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.directory.metrics)

    @property
    def path(self) -> Path:
        return self.directory.path

    def read_info(self) -> RunInfo:
        """Return what config.json says, or raise UserError. Cached until the file changes."""
        if self.reason:
            raise UserError(self.reason)
        modified = modified_ns(self.directory.config)
        if self._info is None or self._info[0] != modified:
            try:
                self._info = (modified, describe_config(self.directory))
            except UserError as error:
                self._info = (modified, str(error))
        info = self._info[1]
        if isinstance(info, str):
            raise UserError(info)
        return info

    def read_last(self) -> LastRecords:
        """Return the last records. Cached until the file changes."""
        try:
            status = self.directory.metrics.stat()
        except OSError:
            return LastRecords()
        key = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._last is None or self._last[0] != key:
            self._last = (key, read_last(self.directory.metrics))
        return self._last[1]

    def summarize(self) -> Summary:
        try:
            info = self.read_info()
            last = self.read_last()
            alarms, skipped = read_notes(self, "alarms"), read_notes(self, "skipped_steps")
        except (UserError, OSError, ValueError) as error:
            return Summary(self.id, str(self.path), "problem", describe_error(error))
        step = int(last.train.get("step", 0))
        rate = last.train.get("examples_per_second")
        pace = rate / info.batch_size if isinstance(rate, (int, float)) and rate > 0 else None
        state, reason = self.find_state(info, step, skipped)
        is_training = state == "training" and pace is not None
        value = last.validation.get(f"val_ema/{info.metric}")
        return Summary(
            id=self.id,
            path=str(self.path),
            state=state,
            reason=reason,
            info=info,
            step=step,
            value=value if isinstance(value, (int, float)) else None,
            loss=last.loss,
            spark=last.spark,
            alarm=alarms[-1] if alarms else None,
            steps_per_second=pace,
            seconds_left=(info.steps - step) / pace if is_training and pace else None,
            can_sample=self.has_checkpoint(),
            modified=self._last[0][2] / 1e9 if self._last else 0.0,
        )

    def find_state(self, info: RunInfo, step: int, skipped: list[Json]) -> tuple[State, str]:
        if self.directory.is_locked():
            return "training", ""
        if step >= info.steps:
            return "done", ""
        recent = [one for one in skipped if isinstance(one.get("step"), int) and one["step"] > step]
        if recent:
            count = len(recent)
            return "problem", f"It stopped after {count} skipped step(s) with non-finite values."
        return "stopped", "" if step else "It has no step yet."

    def has_checkpoint(self) -> bool:
        return any(self.directory.checkpoints.glob("[0-9]*/manifest.json"))


def describe_config(directory: RunDirectory) -> RunInfo:
    config = directory.read_config()
    missing = [name for name in ("recipe", "task", "data", "engine") if name not in config]
    if missing:
        raise UserError(
            f"config.json has no {missing[0]!r}: it is damaged, or the folder is not a run of this "
            "version."
        )
    recipe = find_recipe(str(config["recipe"]))
    modality = next(one for one in modalities.MODALITIES.values() if recipe in one.recipes)
    task, data, engine = config["task"], config["data"], config["engine"]
    try:
        names = [one.name for one in directory.dependencies.iterdir()]
    except OSError:
        names = []
    try:
        return RunInfo(
            recipe=recipe.name,
            modality=modality.name,
            kind=recipe.kind,
            metric=recipe.metric,
            data=data.get("path") or "synthetic",
            steps=int(engine["steps"]),
            batch_size=int(engine["batch_size"]),
            dependencies={name: str(task[name]) for name in sorted(names) if name in task},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"config.json cannot be used ({type(error).__name__}: {error}): it is damaged, or of "
            "another version."
        ) from None


def modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def describe_error(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"It cannot be read ({error.strerror or error})."
    return str(error)


# ---- the page of one run


NOTES = {"alarms": "alarms.jsonl", "skipped_steps": "nonfinite.jsonl", "rejected": "rejected.jsonl"}


def read_notes(run: FoundRun, name: str) -> list[Json]:
    """Return the alarms, the skipped steps or the rejected examples of a run."""
    try:
        lines = run.directory.read_notes(NOTES[name])
    except (OSError, ValueError):
        return []
    return [line for line in lines if isinstance(line, dict)]


def read_evaluation(run: FoundRun) -> Json | None:
    """Return the metrics that `tessera evaluate` wrote, without values that JSON lacks."""
    try:
        content = json.loads((run.path / "evaluation.json").read_text(encoding="utf-8"))
        metrics = content["metrics"]
        return {
            "metrics": {
                weights: {
                    name: value if math.isfinite(value) else None for name, value in values.items()
                }
                for weights, values in metrics.items()
            },
            "protocol": content.get("protocol", {}),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def describe_run(run: FoundRun) -> Json:
    """Return everything about one run except its curves and samples."""
    summary = run.summarize()
    if run.reason:
        nothing: Json = {"config": None, "card": "", "notes": {}, "evaluation": None}
        return {"summary": summary.as_json(), **nothing}
    try:
        config: Json | None = run.directory.read_config()
    except (UserError, OSError):
        config = None
    try:
        card = run.directory.card.read_text(encoding="utf-8", errors="replace")
    except OSError:
        card = ""
    return {
        "summary": summary.as_json(),
        "config": config,
        "card": card,
        "notes": {name: read_notes(run, name) for name in NOTES},
        "evaluation": read_evaluation(run),
    }

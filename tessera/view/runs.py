"""Find run directories below some folders, and describe them without torch.

A run is known to the page by its id, the path below a given folder. Requests name ids, which are
looked up among the runs that were found: no path of a request is ever opened as such.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
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

MAX_DEPTH = 4
"""How far below a given folder runs are searched."""
INDEX_FILES = ("index.json", "embeddings.safetensors")
RUN_PARTS = ("config.json", "metrics.jsonl", "checkpoints")
READ_NAMES = (
    "config.json metrics.jsonl README.md evaluation.json classes.json alarms.jsonl "
    "nonfinite.jsonl rejected.jsonl samples checkpoints dependencies cache lock"
).split()
"""What is read of a run."""


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


class RunLibrary:
    """The runs and indexes below the given folders."""

    def __init__(self, folders: list[Path]):
        self.folders = [folder.absolute() for folder in folders]
        self.roots = [folder.resolve() for folder in folders]
        self._known: dict[str, FoundRun] = {}

    # ---- finding

    def find(self) -> dict[str, FoundRun]:
        """Return all runs by id; what was read of known ones is kept."""
        found: dict[str, FoundRun] = {}
        for folder in self.folders:
            prefix = f"{folder.name}/" if len(self.folders) > 1 else ""
            for path, reason in find_runs(folder):
                relative = path.relative_to(folder).as_posix()
                run_id = prefix + (relative if relative != "." else folder.name)
                known = self._known.get(run_id)
                reason = reason or self.find_outside(path)
                if known is None or known.path != path or known.reason != reason:
                    known = FoundRun(run_id, RunDirectory(path), reason)
                found[run_id] = known
        self._known = found
        return found

    def get(self, run_id: str) -> FoundRun:
        """Return a run by its id, or raise KeyError."""
        if run_id not in self._known:
            self.find()
        return self._known[run_id]

    def find_outside(self, run: Path) -> str:
        """Return a reason if a link leads from a run to files outside of the given folders."""
        for path in (run, *(run / name for name in READ_NAMES)):
            if (path.is_symlink() or path == run) and not self.contains(path):
                return f"{path.name} is a link to a place outside of the folders that are shown."
        return ""

    def contains(self, path: Path) -> bool:
        """Return whether a path, with all links resolved, is inside of the given folders."""
        resolved = path.resolve()
        return any(resolved.is_relative_to(root) for root in self.roots)

    def indexes(self) -> list[Json]:
        """Return the search indexes that `tessera index` wrote below the given folders."""
        found = []
        for folder in self.folders:
            for path in walk(folder, depth=MAX_DEPTH + 2):
                if all((path / name).is_file() for name in INDEX_FILES) and self.contains(path):
                    shown = path.relative_to(folder).as_posix()
                    found.append({"path": str(path), "name": shown, **describe_index(path)})
        return found

    # ---- the table

    def summaries(self) -> list[Summary]:
        rows = [run.summarize() for run in self.find().values()]
        by_path = {Path(row.path).resolve(): row.id for row in rows}
        linked = []
        for row in rows:
            depends_on = {
                name: found
                for name, given in (row.info.dependencies if row.info else {}).items()
                if (found := match_path(given, Path(row.path), by_path))
            }
            linked.append(Summary(**(vars(row) | {"depends_on": depends_on})))
        return linked


def match_path(given: str, run: Path, by_path: dict[Path, str]) -> str | None:
    """Return the id of the run at a path that was relative to an unknown folder.

    The folder is most likely one above the run itself.
    """
    for base in (Path(), *run.resolve().parents):
        found = by_path.get((base / given).resolve())
        if found is not None:
            return found
    return None


def find_runs(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield run directories with the reason why one is unusable, in the order of their names."""
    if not folder.is_dir():
        yield folder, "The folder does not exist."
        return
    if looks_like_run(folder):
        yield folder, ""
        return
    for entry in list_folders(folder):
        if looks_like_index(entry):
            continue
        inside = list(find_runs_below(entry, MAX_DEPTH - 1))
        if inside:
            yield from ((path, "") for path in inside)
        else:
            yield entry, "It is not a run: it has no config.json, no metrics and no checkpoints."


def find_runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if looks_like_run(folder):
        yield folder
    elif depth and not looks_like_index(folder):
        for entry in list_folders(folder):
            yield from find_runs_below(entry, depth - 1)


def looks_like_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_PARTS)


def looks_like_index(folder: Path) -> bool:
    return all((folder / name).is_file() for name in INDEX_FILES)


def list_folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if one.is_dir() and not one.name.startswith(".")]
    except OSError:
        return []
    return [folder / name for name in sorted(names)]


def walk(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth:
        for entry in list_folders(folder):
            if not entry.is_symlink() and entry.name not in ("samples", "checkpoints"):
                yield from walk(entry, depth - 1)


def describe_index(path: Path) -> Json:
    try:
        content = json.loads((path / INDEX_FILES[0]).read_text(encoding="utf-8"))
        return {"examples": len(content["names"]), "data": str(content["data"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"examples": 0, "data": "unreadable"}


# ---- one run


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

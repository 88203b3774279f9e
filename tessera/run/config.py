"""A run as one frozen dataclass, and dataclasses to JSON and back.

`config.json` is the whole Run: it and the folder it stands in are all that sampling needs. A field
whose type is a union of dataclasses is stored with its class's name under "kind" and read back
among the members of that union only: the annotations are the register, there is no other.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union

from tessera.engine.engine import EngineConfig
from tessera.run.directory import UserError

Dataclass = TypeVar("Dataclass")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, from what, and for how long. The recipe says which configurations `task` and
    `data` are."""

    recipe: str
    """The recipe this run was made by."""
    task: Any
    """The configuration of a task: `build(**parts)` makes it, `parts()` names the runs it stands
    on, `validate_data(data)` refuses data that it cannot learn from."""
    data: Any
    """The configuration of a source: `build()` makes a Split, `full()` all of it in order; `path`
    is where it lies."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    published: str = ""
    """What the paper says of the size of these networks, where the preset follows one."""

    def __post_init__(self) -> None:
        self.task.validate_data(self.data)
        if self.engine.batch_size < self.least_batch:
            raise ValueError(
                f"What is learnt here is learnt by comparing examples, and in a batch of {self.engine.batch_size} there is "
                f"nothing to compare: use a --batch-size of {self.least_batch} or, better, of 64 and more."
            )

    @property
    def least_batch(self) -> int:
        """How many examples the task needs in a step."""
        return getattr(self.task, "least_batch", 1)

    def build_task(self, parts: Mapping[str, Any]) -> Any:
        """The task, with weights as the global generators give them, on the finished runs that it
        stands on.

        A part that cannot be had is a letter, not a trace.
        """
        try:
            return self.task.build(**parts)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            raise UserError(str(error)) from error


def decode_run(values: dict[str, Any], task: type, data: type) -> Run:
    """The run that `encode` wrote, read with the classes of its recipe's configurations."""
    try:
        return Run(
            recipe=values["recipe"],
            task=decode(task, values["task"], "task."),
            data=decode(data, values["data"], "data."),
            engine=decode(EngineConfig, values["engine"], "engine."),
            published=values["published"],
        )
    except KeyError as error:
        raise UserError(
            f"The run's config.json has no {error.args[0]!r}: it is not a whole Run."
        ) from None
    except ValueError as error:
        raise UserError(str(error)) from None


MAY_DIFFER = frozenset(
    f"engine.{name}"
    for name in (
        "steps log_every validate_every sample_every sample_count checkpoint_every keep_last keep_every workers processes "
        "track start_from"
    ).split()
) | {"task.tokenizer", "task.smaller", "task.semantic", "task.tokens"}
"""What may change when a run goes on: how long, how often it reports, on what it is carried out,
and where the runs lie that it stands on (the folder has copies of them, which must be the same:
`parts.py`)."""


def encode(value: Any, declared: Any = None) -> Any:
    """A dataclass as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        encoded = {
            f.name: encode(getattr(value, f.name), hints[f.name]) for f in dataclasses.fields(value)
        }
        return (
            {"kind": type(value).__name__, **encoded}
            if len(_dataclasses_in(declared)) > 1
            else encoded
        )
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def decode(kind: type[Dataclass], values: dict[str, Any], place: str = "") -> Dataclass:
    """The dataclass that `encode` wrote; an unknown field is refused with the nearest name."""
    if not isinstance(values, dict):
        raise UserError(
            f"{place or kind.__name__} must be a group of settings, but it is {values!r}."
        )
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise UserError(
                f"There is no setting {place + name!r} in {kind.__name__}{did_you_mean(name, known)}"
            )
    decoded = {
        name: _decoded(hints[name], value, f"{place}{name}") for name, value in values.items()
    }
    try:
        return kind(**decoded)
    except TypeError as error:
        raise UserError(f"{place or kind.__name__}: {error}.") from None
    except ValueError as error:
        raise UserError(str(error)) from None


def _decoded(hint: Any, value: Any, place: str) -> Any:
    candidates = _dataclasses_in(hint)
    if value is None or (not candidates and hint is Any):
        return value
    if candidates and isinstance(value, dict):
        alone = len(candidates) == 1  # then "kind" is a field of the dataclass, or nothing at all
        return decode(
            _chosen(candidates, value, place),
            {k: v for k, v in value.items() if alone or k != "kind"},
            f"{place}.",
        )
    if isinstance(value, list):
        return tuple(value)
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and float in (hint, *typing.get_args(hint))
    ):
        return float(value)
    return value


def _chosen(candidates: list[type], value: dict[str, Any], place: str) -> type:
    if len(candidates) == 1:
        return candidates[0]
    for candidate in candidates:
        if candidate.__name__ == value.get("kind"):
            return candidate
    names = [candidate.__name__ for candidate in candidates]
    raise UserError(
        f"{place} is of kind {value.get('kind')!r}, but it can only be {' or '.join(names)}."
    )


def _dataclasses_in(hint: Any) -> list[type]:
    """The dataclasses among a type's alternatives."""
    if typing.get_origin(hint) is typing.Annotated:
        return _dataclasses_in(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [one for option in typing.get_args(hint) for one in _dataclasses_in(option)]
    return [hint] if isinstance(hint, type) and dataclasses.is_dataclass(hint) else []


def did_you_mean(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else f". There are: {', '.join(known)}."


def flat(values: dict[str, Any], place: str = "") -> dict[str, Any]:
    """{"engine": {"steps": 3}} as {"engine.steps": 3}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= (
            flat(value, f"{place}{name}.") if isinstance(value, dict) else {f"{place}{name}": value}
        )
    return found


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The settings in which a run differs from what its folder says, without those that may."""
    before, after = flat(old), flat(new)
    return [
        f"{name}: {before.get(name, 'absent')} in the folder, {after.get(name, 'absent')} asked for"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and name not in MAY_DIFFER
    ]

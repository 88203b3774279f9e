"""A run as one frozen dataclass, and the conversion of dataclasses to JSON and back.

config.json holds the whole Run; it and the run directory are all that sampling needs. The recipe
determines the classes of the task and data configurations. A field whose type is a union of
dataclasses is stored with the name of its class under "class" and read back among the members of
that union only.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, Union

from tessera.data.dataset import DataConfig
from tessera.engine.config import EngineConfig
from tessera.engine.task import Task, TaskConfig
from tessera.run.directory import VERSION, Json
from tessera.run.errors import UserError, as_user_error

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from tessera.objectives.generation import TokenizerProtocol

Dataclass = TypeVar("Dataclass", bound="DataclassInstance")

NEVER_FROM_FILES = frozenset({"download"})
"""Settings that only a command may enable: the configuration of a run may come from others, and
must not make a program connect to another computer."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, on which data, and for how long."""

    recipe: str
    """The name of the recipe."""
    task: TaskConfig
    data: DataConfig
    engine: EngineConfig = field(default_factory=EngineConfig)
    reference: str = ""
    """The size of the published model, where the preset follows a paper."""

    def __post_init__(self) -> None:
        self.task.validate_data(self.data)
        if self.engine.batch_size < self.task.min_batch_size:
            raise ValueError(
                f"This loss compares examples with each other, but the batch size is "
                f"{self.engine.batch_size}: use --batch-size {self.task.min_batch_size} or, "
                "better, 64 or more."
            )

    def build_task(self, dependencies: Mapping[str, TokenizerProtocol]) -> Task:
        """Build the task with weights drawn from the global generators."""
        with as_user_error(ValueError, OSError, ModuleNotFoundError):
            return self.task.build(**dependencies)


def decode_run(values: Json, task: type[TaskConfig], data: type[DataConfig]) -> Run:
    """Decode what `encode` wrote, with the classes of the recipe's configurations."""
    for name in ("recipe", "task", "data", "engine", "reference"):
        if name not in values:
            raise UserError(f"config.json has no {name!r}: it is not complete.")
    for name in ("recipe", "reference"):
        if not isinstance(values[name], str):
            raise UserError(f"{name!r} in config.json must be a text, got {values[name]!r}.")
    with as_user_error(ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
        return Run(
            recipe=values["recipe"],
            task=decode(task, values["task"], "task."),
            data=decode(data, values["data"], "data."),
            engine=decode(EngineConfig, values["engine"], "engine."),
            reference=values["reference"],
        )


MAY_DIFFER = frozenset(
    f"engine.{name}"
    for name in (
        "steps log_every validate_every sample_every sample_count checkpoint_every keep_last "
        "keep_every num_workers nproc log_with init_from shard compile checkpoint_activations"
    ).split()
) | {
    "task.tokenizer",
    "task.low_res_tokenizer",
    "task.semantic",
    "task.soundstorm",
    "task.tokens",
    "data.download",
}
"""The settings that may change when a run is resumed: its length, how often it reports, how it is
executed, and the paths of the runs it depends on, of which the run directory has copies."""


def encode(value: object, declared: object = None) -> Any:
    """Convert a dataclass to plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        fields = dataclasses.fields(value)
        encoded = {f.name: encode(getattr(value, f.name), hints[f.name]) for f in fields}
        is_union = len(dataclasses_in(declared)) > 1
        return {"class": type(value).__name__, **encoded} if is_union else encoded
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def decode(kind: type[Dataclass], values: Json, prefix: str = "") -> Dataclass:
    """Convert JSON values to a dataclass; an unknown field is rejected with the closest name."""
    if not isinstance(values, dict):
        raise UserError(f"{prefix or kind.__name__} must be a JSON object, got {values!r}.")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            raise UserError(
                f"{kind.__name__} has no setting {prefix + name!r}{did_you_mean(name, known)}"
            )
    decoded = {
        name: decode_value(hints[name], value, f"{prefix}{name}") for name, value in values.items()
    }
    for name in NEVER_FROM_FILES & decoded.keys():
        decoded[name] = False
    with as_user_error(ValueError):
        try:
            return kind(**decoded)
        except (TypeError, ArithmeticError, LookupError, AttributeError) as error:
            raise UserError(f"{prefix or kind.__name__}: {error}.") from None


def decode_value(hint: object, value: object, name: str) -> object:
    """Convert a JSON value to the type of its field, or raise UserError with the expected type."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    candidates = dataclasses_in(hint)
    if candidates and isinstance(value, dict):
        chosen = candidates[0]
        if len(candidates) > 1:
            value = dict(value)
            chosen = choose_class(candidates, value.pop("class", None), name)
        return decode(chosen, value, f"{name}.")
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    for option in typing.get_args(hint) if is_union else (hint,):
        if has_type(value, option):
            return convert_value(value, option)
    shown = json.dumps(value)
    raise UserError(
        f"{name} must be {describe_type(hint)}, got {shown if len(shown) < 80 else shown[:80]}."
    )


def has_type(value: object, hint: object) -> bool:
    """Return whether a JSON value can be converted to a type; unusual types accept anything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return any(value == one and type(value) is type(one) for one in arguments)
    if origin in (Union, types.UnionType):
        return any(has_type(value, option) for option in arguments)
    if hint is tuple or origin is tuple:
        return isinstance(value, list) and has_item_types(value, arguments)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, dict, list):
        return isinstance(value, typing.cast(type, hint))
    if hint is None or hint is type(None):
        return value is None
    return not (isinstance(hint, type) and dataclasses.is_dataclass(hint))


def has_item_types(values: list[object], types_: tuple[object, ...]) -> bool:
    if len(types_) == 2 and types_[1] is ...:
        return all(has_type(value, types_[0]) for value in values)
    return not types_ or (len(values) == len(types_) and all(map(has_type, values, types_)))


def convert_value(value: object, hint: object) -> object:
    """Convert whole numbers to floats and lists to tuples, where a type has these."""
    if hint is float and isinstance(value, int):
        with as_user_error(OverflowError):
            return float(value)
    if isinstance(value, list):
        arguments = typing.get_args(hint)
        inner = arguments[0] if arguments else Any
        return tuple(convert_value(item, inner) for item in value)
    return value


def describe_type(hint: object) -> str:
    """Return a type as in "a whole number or null"."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe_type(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(json.dumps(one) for one in typing.get_args(hint))
    if hint is tuple or typing.get_origin(hint) is tuple:
        return "a list"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return "a JSON object"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return "null" if hint is type(None) else names.get(hint, str(hint))  # type: ignore[call-overload]


def choose_class(candidates: list[type], class_name: object, name: str) -> type:
    for candidate in candidates:
        if candidate.__name__ == class_name:
            return candidate
    names = [candidate.__name__ for candidate in candidates]
    raise UserError(f"The class of {name} must be {' or '.join(names)}, got {class_name!r}.")


def dataclasses_in(hint: object) -> list[type]:
    """Return the dataclasses among the alternatives of a type."""
    if typing.get_origin(hint) is typing.Annotated:
        return dataclasses_in(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [one for option in typing.get_args(hint) for one in dataclasses_in(option)]
    return [hint] if isinstance(hint, type) and dataclasses.is_dataclass(hint) else []


def did_you_mean(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else f". Known names: {', '.join(known)}."


def flatten(values: Json, prefix: str = "") -> Json:
    """Convert {"engine": {"steps": 3}} to {"engine.steps": 3}."""
    result: Json = {}
    for name, value in values.items():
        is_nested = isinstance(value, dict)
        result |= flatten(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return result


def list_differences(stored: Json, requested: Json) -> list[str]:
    """Return the settings that differ from those of a run directory, except those that may."""
    before, after = flatten(stored), flatten(requested)
    return [
        f"{name}: {before.get(name, 'absent')} in the folder, {after.get(name, 'absent')} requested"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and name not in MAY_DIFFER and name != VERSION
    ]

"""Forms of the playground: the flags of a command as fields.

The fields are the parameters of the functions in `tessera/cli/commands.py`, from which the flags
are made too, and their values are the arguments of a call of the same function. A form has only
the flags that a run supports.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

from tessera import modalities
from tessera.cli import commands
from tessera.recipes.registry import find_recipe
from tessera.run.directory import Json
from tessera.run.errors import UserError
from tessera.view.library import RunLibrary
from tessera.view.runs import FoundRun, Kind

Input = Literal["text", "lines", "integer", "integers", "number", "choice", "file", "run", "index"]

MAX_TEXT = 4_000
"""The number of characters of a text field."""
MAX_COUNT = 64
"""The number of samples of one job."""
MAX_INTEGER = 2**31

LABELS: dict[Kind, dict[str, str]] = {
    "tokenizer": {"data": "File"},
    "generator": {
        "data": "Start from a file",
        "like": "Recording to follow",
        "prompt_audio": "Voice",
        "mask": "Mask",
        "first_frame": "First frame",
        "last_frame": "Last frame",
    },
    "embedding": {},
}
"""Kind of run -> labels of its file fields."""
HELP = {
    "generator": "Generate samples. Settings that are left empty are those of the run, and without "
    "a prompt held-out captions are used.",
    "superres": "Generate small images with the base run and enlarge them.",
}
MODALITY_OF_INPUT = {"mask": "image", "first_frame": "image", "last_frame": "image"}
"""Inputs of another modality than the run."""
SHARED_SUFFIXES = {"image": (".webp", ".gif"), "video": (".webp", ".gif"), "audio": (".webm",)}
"""Modality -> the suffixes that it reads and shares with another modality."""
GUIDANCE_FIELDS = {
    "guidance": "scale",
    "guidance_from": "start",
    "guidance_to": "end",
    "guidance_ramp": "ramp",
}
"""Flag -> field of the guidance configuration."""


@dataclass(frozen=True)
class Field:
    name: str
    """The parameter of the command."""
    label: str
    help: str
    input: Input
    default: Any = None
    """The value that is used if the field is left empty."""
    choices: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    """The suffixes of files that can be uploaded."""
    modality: str = ""
    """The modality of these files."""
    is_main: bool = False
    """Whether the field is shown first; the others are behind a disclosure."""


@dataclass(frozen=True)
class Form:
    command: str
    title: str
    help: str
    fields: tuple[Field, ...]

    def as_json(self) -> Json:
        return asdict(self)

    def field(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise UserError(f"This form has no field {name!r}.")


# ---- parameters of commands


@dataclass(frozen=True)
class Parameter:
    name: str
    type: object
    default: object
    help: str


@cache
def parameters_of(command: str) -> dict[str, Parameter]:
    """Return the parameters of a command with the help of their flags."""
    function = commands.COMMANDS[command]
    hints = typing.get_type_hints(function)
    help_texts = read_arguments(inspect.getdoc(function) or "")
    return {
        name: Parameter(name, hints[name], one.default, help_texts.get(name, ""))
        for name, one in inspect.signature(function).parameters.items()
    }


def read_arguments(docstring: str) -> dict[str, str]:
    """Return the sentences below `Args:` by parameter."""
    _, _, section = docstring.partition("Args:\n")
    found = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(found[::2], found[1::2])}


def choices_of(hint: object) -> tuple[str, ...]:
    """Return the values of a Literal, also within an optional type."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(filter(None, map(choices_of, typing.get_args(hint))), ())
    return ()


def input_of(hint: object) -> Input:
    if choices_of(hint):
        return "choice"
    kinds = {hint, *typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return "lines" if str in kinds else "integers"
    if int in kinds:
        return "integer"
    return "number" if float in kinds else "text"


def make_field(command: str, name: str, /, **changes: object) -> Field:
    parameter = parameters_of(command)[name]
    is_required = parameter.default is inspect.Parameter.empty
    default = None if is_required else parameter.default
    values: Json = {
        "name": name,
        "label": name.replace("_", " ").capitalize(),
        "help": parameter.help,
        "input": input_of(parameter.type),
        "default": list(default) if isinstance(default, tuple) else default,
        "choices": choices_of(parameter.type),
    }
    return Field(**(values | changes))


# ---- forms of a run


def forms_of(run: FoundRun, library: RunLibrary) -> list[Form]:
    """Return what can be done with a trained run."""
    info = run.read_info()
    builders: dict[str, Callable[[FoundRun, RunLibrary], list[Form]]] = {
        "tokenizer": reconstruction_forms,
        "generator": generation_forms,
        "embedding": search_forms,
    }
    return builders[info.kind](run, library)


def reconstruction_forms(run: FoundRun, library: RunLibrary) -> list[Form]:
    fields = [
        *file_fields(run),
        make_field("sample", "count", default=4, is_main=True),
        make_field("sample", "seed"),
        make_field("sample", "weights"),
    ]
    text = (
        "Encode a file as tokens and decode them again. Without a file, held-out examples are "
        "reconstructed."
    )
    return [Form("sample", "Round trip", text, tuple(fields))]


def generation_forms(run: FoundRun, library: RunLibrary) -> list[Form]:
    config = run.directory.read_config()
    task = config["task"]
    has_text = isinstance(task.get("model"), dict) and task["model"].get("text") is not None
    fields: list[Field] = []
    is_superres = bool(task.get("low_res_tokenizer"))
    if is_superres:
        choices = tuple(sorted(ids_where(library, run, superres=False)))
        fields.append(
            make_field(
                "sample",
                "run",
                label="Base run",
                help="The run that generates the small images. Without it, the condition comes "
                "from the image below or from held-out images.",
                input="run",
                default=None,
                choices=choices,
                is_main=True,
            )
        )
    if has_text:
        classes = tuple(run.directory.read_classes())
        fields.append(make_field("sample", "prompt", choices=classes, is_main=True))
    fields += file_fields(run)
    fields += [
        make_field("sample", "count", default=4, is_main=True),
        make_field("sample", "seed", is_main=True),
    ]
    if has_text:
        fields.append(make_field("sample", "negative_prompt"))
    if not is_superres and (superres := ids_where(library, run, superres=True)):
        fields.append(
            make_field("sample", "superres", input="run", choices=tuple(sorted(superres)))
        )
        fields.append(make_field("sample", "superres_decoding_steps"))
    fields += [
        make_field("sample", name, default=task["sampling"][name])
        for name in parameters_of("sample")
        if name in (task.get("sampling") or {})
    ]
    guidance = task.get("guidance") or {}
    if has_text:
        fields += [
            make_field("sample", flag, default=guidance[name])
            for flag, name in GUIDANCE_FIELDS.items()
            if name in guidance
        ]
    fields.append(make_field("sample", "weights"))
    if is_superres:
        return [Form("sample", "Enlarge", HELP["superres"], tuple(fields))]
    return [Form("sample", "Generate", HELP["generator"], tuple(fields))]


def search_forms(run: FoundRun, library: RunLibrary) -> list[Form]:
    indexes = tuple(one["path"] for one in library.indexes())
    search = [
        make_field("search", "index", input="index", choices=indexes, is_main=True),
        make_field("search", "query", help="A description of the music.", is_main=True),
        make_field(
            "search",
            "query",
            name="query_file",
            label="Or a recording",
            help="Find music that resembles this recording.",
            input="file",
            suffixes=suffixes_of("audio"),
            modality="audio",
            is_main=True,
        ),
        make_field("search", "top", is_main=True),
    ]
    index = [make_field("index", "weights"), make_field("index", "batch_size")]
    return [
        Form("search", "Search", "Find the nearest music in an index.", tuple(search)),
        Form("index", "Build an index", "Embed the data of this run for search.", tuple(index)),
        Form(
            "sample",
            "Similarity matrix",
            "Compare held-out recordings with their captions.",
            (make_field("sample", "count", is_main=True), make_field("sample", "weights")),
        ),
    ]


def file_fields(run: FoundRun) -> list[Field]:
    """Return the fields of the files that the recipe of a run can start from."""
    info = run.read_info()
    fields = []
    for name in find_recipe(info.recipe).media_inputs:
        is_file = input_of(parameters_of("sample")[name].type) == "text"
        modality = MODALITY_OF_INPUT.get(name, info.modality)
        suffixes = suffixes_of(modality)
        changes: Json = {"input": "file", "suffixes": suffixes, "modality": modality}
        changes = changes if is_file else {}
        if name in LABELS[info.kind]:
            changes["label"] = LABELS[info.kind][name]
        is_main = name != "mask"  # which is usually painted
        fields.append(make_field("sample", name, is_main=is_main, **changes))
    return fields


def suffixes_of(modality: str) -> tuple[str, ...]:
    """Return the suffixes of files that a modality reads."""
    return modalities.MODALITIES[modality].suffixes + SHARED_SUFFIXES.get(modality, ())


def ids_where(library: RunLibrary, run: FoundRun, *, superres: bool) -> list[str]:
    """Return generators of the same modality that are, or are not, super-resolution runs."""
    found = []
    for run_id, other in library.find().items():
        try:
            info = other.read_info()
            task = other.directory.read_config()["task"]
        except (UserError, OSError):
            continue
        same = info.kind == "generator" and info.modality == run.read_info().modality
        if same and "low_res_tokenizer" in task and bool(task["low_res_tokenizer"]) == superres:
            found.append(run_id)
    return found


# ---- values


def parse_value(field: Field, value: Any) -> Any:
    """Convert a value of a request to the type of its field, or raise UserError."""
    if field.input == "text":
        return check_text(field, value)
    if field.input in ("choice", "index", "run"):
        if value not in field.choices:
            raise UserError(f"{field.label} must be one of {', '.join(field.choices)}.")
        return value
    if field.input == "lines":
        texts = value if isinstance(value, list) else [value]
        return tuple(check_text(field, text) for text in texts[:MAX_COUNT] if text != "")
    if field.input == "integers":
        numbers = value if isinstance(value, list) else str(value).split()
        return tuple(parse_integer(field, one) for one in numbers[:MAX_COUNT])
    if field.input == "integer":
        return parse_integer(field, value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"{field.label} must be a number, got {value!r}.") from None
    if not math.isfinite(number):
        raise UserError(f"{field.label} must be finite, got {value!r}.")
    return number


def check_text(field: Field, value: object) -> str:
    if not isinstance(value, str):
        raise UserError(f"{field.label} must be a text, got {value!r}.")
    if len(value) > MAX_TEXT:
        raise UserError(
            f"{field.label} has {len(value):,} characters, and at most {MAX_TEXT:,} are accepted."
        )
    return value


def parse_integer(field: Field, value: str | float) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise UserError(f"{field.label} must be a whole number, got {value!r}.") from None
    limit = MAX_COUNT if field.name in ("count", "top") else MAX_INTEGER
    if abs(number) > limit:
        raise UserError(f"{field.label} must be at most {limit:,}, got {number:,}.")
    return number

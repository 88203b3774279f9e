"""The registry of modalities: the only place that lists them.

Each subpackage defines `MODALITY` in its `__init__.py`. References to code are strings of the form
`module:attribute`, so that listing recipes imports neither torch nor a decoder. A modality outside
this package joins with `register`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tessera.data.discovery import DEFAULT_OPTIONS, SourceOptions, list_names
from tessera.data.inspect import Report

if TYPE_CHECKING:
    from tessera.data.dataset import DataConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named function that returns a `Run`, and the classes of that run's configurations."""

    build: str
    """`module:function`; the function's parameters are the recipe's own flags of `tessera
    train`."""
    task: str
    """`module:class` of the run's task configuration, used to read config.json."""
    data: str
    """`module:class` of the run's data configuration, used to read config.json."""
    kind: Literal["tokenizer", "generator", "embedding"]
    """What a trained run does."""
    metric: str
    """The validation metric that is shown first: the task's `best_metric`."""
    media_inputs: tuple[str, ...] = ()
    """The flags of `tessera sample` that take files for this recipe, and those that depend on
    them."""
    suggested: Literal["always", "captioned", "never"] = "always"
    """When `tessera check` suggests it for a folder of files: captioned is for files with texts."""
    caption_flags: tuple[tuple[str, str], ...] = ()
    """The recipe's own flags and their values that `tessera check` adds for files with texts."""
    captions_are: str = "captions"
    """What the texts of files have to be, such as transcripts."""

    @property
    def name(self) -> str:
        """The name on the command line: `images_vqgan` becomes `images-vqgan`."""
        return self.build.partition(":")[2].replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class DemoStep:
    """One step of `tessera demo`."""

    description: str
    """Printed before the step."""
    command: tuple[str, ...]
    """Arguments of `tessera`; `{out}` is replaced by the demo's folder."""
    creates: str = ""
    """A file that the step creates; if it exists, the step is skipped."""


@dataclass(frozen=True, kw_only=True)
class Modality:
    name: str
    """The name on the command line: `image`."""
    suffixes: tuple[str, ...] = ()
    """File name endings that only this modality uses; `tessera check` detects the modality by
    them."""
    media: str
    """`module:class` of one example that can be saved and shown."""
    inspect: str | None = None
    """`module:function` that inspects a folder; None if another modality inspects the same
    files."""
    measure: str | None = None
    """`module:function` that returns the size of a file by its header, before it is decoded, as
    pixels, seconds or faces; None if another modality has the same files."""
    recipes: tuple[Recipe, ...]
    demo: tuple[DemoStep, ...] = field(default=())
    demo_next: tuple[str, ...] = ()
    """Arguments of `tessera` that the demo suggests at its end, with `{out}` as in its steps."""

    @property
    def demo_run(self) -> str:
        """The folder of the last run that the demo trains."""
        trained = [step.command for step in self.demo if step.command[0] == "train"]
        return trained[-1][trained[-1].index("--out") + 1]


MODALITIES: dict[str, Modality] = {}


def register(modality: Modality) -> None:
    """Add a modality. Registering the same one twice has no effect."""
    known = MODALITIES.get(modality.name)
    if known is not None and known != modality:
        raise ValueError(
            f"A modality named {modality.name!r} is registered already; choose another name."
        )
    MODALITIES[modality.name] = modality


def resolve(reference: str) -> Any:
    """Import what a `module:attribute` string names."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def recipes() -> dict[str, Recipe]:
    """Return every recipe by name, in the order of registration."""
    return {recipe.name: recipe for modality in MODALITIES.values() for recipe in modality.recipes}


def data_class(modality: Modality) -> type[DataConfig]:
    """Return the class of the data configuration of a modality's recipes."""
    return resolve(modality.recipes[0].data)


def inspect_folder(
    path: str, modality: Modality, options: SourceOptions = DEFAULT_OPTIONS
) -> Report:
    """Inspect the files of one modality."""
    assert modality.inspect is not None
    report: Report = resolve(modality.inspect)(path, options=options)
    return report


def detect_modality(path: str, options: SourceOptions = DEFAULT_OPTIONS) -> Modality:
    """Return the modality whose own suffixes most of the files have.

    GIF and WebP files can be images or videos and count for neither; a folder of only these is one
    of images.
    """
    candidates = {
        modality.name: modality.suffixes
        for modality in MODALITIES.values()
        if modality.inspect is not None
    }
    known = tuple(suffix for suffixes in candidates.values() for suffix in suffixes)
    names = [name.lower() for name in list_names(path, known, options)]
    most = max(candidates, key=lambda name: sum(file.endswith(candidates[name]) for file in names))
    return MODALITIES[most]


for _name in ("image", "video", "audio", "music", "mesh"):
    register(importlib.import_module(f"tessera.modalities.{_name}").MODALITY)

"""A call of a command, also as text to copy: for the shell and as Python."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessera.run.directory import Json
from tessera.view.forms import parameters_of
from tessera.view.runs import Kind


@dataclass(frozen=True)
class Call:
    """A call of a command: its positional arguments and its flags."""

    command: str
    positional: tuple[str, ...]
    options: Mapping[str, Any]
    kind: Kind = "generator"
    """The kind of the run."""
    out: str | None = None
    """The output folder, where the command has no default."""

    def as_shell(self) -> str:
        words = ["tessera", self.command, *self.positional]
        if self.out is not None:
            words += ["--out", self.out]
        for name, value in self.options.items():
            flag = f"--{name.replace('_', '-')}"
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [flag, *map(str, values)]
        return shlex.join(words)

    def as_python(self) -> str:
        writers = {"sample": self.sample_as_python, "search": self.search_as_python}
        return writers.get(self.command, self.call_as_python)()

    def call_as_python(self) -> str:
        arguments = [
            *map(repr, self.positional),
            *(f"{name}={value!r}" for name, value in self.options.items()),
            *([] if self.out is None else [f"out={self.out!r}"]),
        ]
        return (
            f"from tessera.cli.commands import {self.command}\n\n"
            f"{self.command}({', '.join(arguments)})\n"
        )

    def search_as_python(self) -> str:
        index, query = self.positional
        top = self.options.get("top", 10)
        return (
            "from tessera import Index\n\n"
            f"for hit in Index.load({index!r}).search({query!r}, top={top}):\n"
            "    print(hit.rank, hit.similarity, hit.name)\n"
        )

    def sample_as_python(self) -> str:
        """Return the calls of the Python API that `tessera sample` makes."""
        options = dict(self.options)
        if self.kind != "generator":
            return self.reconstruction_as_python(options)
        weights, prompts = options.pop("weights", "ema"), options.pop("prompt", None)
        options["count"] = options.get("count", parameters_of("sample")["count"].default)
        arguments = [repr(list(prompts))] if prompts else []
        arguments += [f"{name}={value!r}" for name, value in options.items()]
        runs = ", ".join(map(repr, self.positional))
        lines = [
            "from tessera import Generator",
            "",
            f'generator = Generator.load({runs}, weights="{weights}")',
            "generated = generator.generate(",
            *(f"    {argument}," for argument in arguments),
            ")",
        ]
        return "\n".join([*lines, *SAVE_LINES]) + "\n"

    def reconstruction_as_python(self, options: Json) -> str:
        weights = options.pop("weights", "ema")
        shown = "".join(f", {name}={value!r}" for name, value in options.items())
        lines = [
            "from tessera.api.evaluation import reconstruct_samples",
            "from tessera.run.load import load_run",
            "",
            f'trained = load_run({self.positional[0]!r}, weights="{weights}")',
            f"generated = reconstruct_samples(trained{shown})",
        ]
        return "\n".join([*lines, *SAVE_LINES]) + "\n"


SAVE_LINES = ("for number, media in enumerate(generated.media):", '    media.save(f"{number:04d}")')

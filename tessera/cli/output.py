"""What commands write and print."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tessera.data.files import written_suffix
from tessera.run.directory import (
    Json,
    move_earlier_samples,
    remove_partial,
    write_atomically,
)
from tessera.run.errors import UserError, printable

Weights = Literal["ema", "raw"]


def find_output_file(out: str | Path, suffixes: Sequence[str]) -> Path | None:
    """Return the path of `out` if it is a file in one of the formats of a medium, None if it is a
    folder.

    Raises:
        UserError: If it ends as a file does, but in none of the formats.
    """
    path, suffix = Path(out), written_suffix(out)
    if not suffix or not suffixes or path.is_dir():
        return None
    if suffix not in suffixes:
        raise UserError(
            f"{out} ends in {path.suffix}, but the formats that can be written are "
            f"{', '.join(suffixes)}: use one of these for a file, or create the folder first if "
            f"{out} is to be one."
        )
    return path


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{path} cannot be written ({reason}). Free some disk space, or give another --out."
        ) from None


@contextmanager
def writing_samples(folder: Path, settings: Json) -> Iterator[None]:
    """Prepare a folder of samples, and write the settings at the end.

    The block may add to the settings. Earlier samples are moved into a subfolder.
    """
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if earlier := move_earlier_samples(folder):
            print(f"The samples that were there before are in {earlier}.")
        remove_partial(folder)
        # First of all, so that the folder is recognised if this process is killed.
        write_json(folder / "settings.json", settings | {"complete": False})
        yield
        write_json(folder / "settings.json", settings)


def write_json(path: Path, content: Json) -> None:
    write_atomically(path, json_module.dumps(content, indent=1) + "\n")


def print_sample_metrics(values: Mapping[str, float]) -> None:
    """Print a row for each value, with that of real examples and that at chance beside it."""
    print(f"{'':24}{'samples':>12}{'real':>12}{'chance':>12}")
    beside = {f"{name}_{kind}" for name in values for kind in ("real", "chance")}
    for name in (name for name in values if name not in beside):
        cells = (values.get(one) for one in (name, f"{name}_real", f"{name}_chance"))
        shown = (f"{'':12}" if cell is None else f"{cell:12.4f}" for cell in cells)
        print(f"{name:24}{''.join(shown)}".rstrip())


def print_notices(lines: list[str]) -> None:
    for line in lines:
        print(printable(line), file=sys.stderr)

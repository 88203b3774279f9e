"""The rows of bench/quality.py: one module for each system, which defines `ROW`."""

from __future__ import annotations

import importlib
from pathlib import Path

from time_to_quality import Row

ROWS = (
    "vqgan",
    "maskgit",
    "magvit2",
    "codec",
    "soundstorm",
    "mulan",
    "mesh_autoencoder",
    "mesh_transformer",
)


def load_row(name: str) -> Row:
    """Import the module of a row. Modules of rows import the packages of their sides lazily."""
    return importlib.import_module(f"quality_rows.{name}").ROW


def row_folder(work: Path, name: str) -> Path:
    """Return the folder of a row's result files."""
    return work / name

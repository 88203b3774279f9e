"""trimesh, which reads and writes meshes, and fast-simplification: the extra tessera[mesh], asked
for only where needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

INSTALL = "which is not installed. Install tessera[mesh]."


def library() -> ModuleType:
    """trimesh, or how to get it."""
    try:
        import trimesh
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Reading and writing meshes needs the Python package trimesh, {INSTALL}"
        ) from error
    return trimesh


def simplification() -> ModuleType:
    """fast-simplification, or how to get it."""
    try:
        import fast_simplification
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Simplifying meshes needs the Python package fast-simplification, {INSTALL}"
        ) from error
    return fast_simplification

"""PyAV, which reads and writes films, and recordings that soundfile cannot read: part of the extras
tessera[video] and tessera[audio], asked for only where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def library() -> ModuleType:
    """PyAV, or how to get it."""
    try:
        import av
    except ImportError as error:
        raise ModuleNotFoundError(
            "Reading and writing video, and some kinds of sound, needs PyAV, the Python package av, which is not installed. "
            "Install tessera[video] or tessera[audio]."
        ) from error
    return av

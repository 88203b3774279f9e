"""soundfile, which reads and writes recordings, and soxr, which resamples them: the extra
tessera[audio], asked for only where needed. What soundfile cannot read, PyAV may
(`modalities/video/io/pyav.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

INSTALL = "which is not installed. Install tessera[audio]."


def library() -> ModuleType:
    """soundfile, or how to get it."""
    try:
        import soundfile
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Reading and writing sound needs the Python package soundfile, {INSTALL}"
        ) from error
    return soundfile


def resampler() -> ModuleType:
    """soxr, or how to get it."""
    try:
        import soxr
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Sound of another rate needs the Python package soxr, {INSTALL}"
        ) from error
    return soxr

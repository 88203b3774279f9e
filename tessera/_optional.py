"""Import packages that only some extras of tessera install."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import and return `module`, or raise ModuleNotFoundError with the command that installs it.

    Args:
        module: The name to import, such as "av" or "fast_simplification".
        extra: The extra of tessera that installs the package, such as "video".
        purpose: What the package is needed for, as the beginning of a sentence: "Reading videos".
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise ModuleNotFoundError(
            f"{purpose} needs the Python package {package}, which is not installed "
            f'(import {module}: {error}). Install it with: pip install "tessera[{extra}]"',
            name=module,
        ) from error

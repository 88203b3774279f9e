"""Errors of single examples; errors of a whole folder are `tessera.run.errors.UserError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UnreadableFile(ValueError):
    """A file that cannot be used, with the reason: "photos/a.png: the file is empty (0 bytes)".

    It has one argument only: an exception with more cannot be pickled on its way from a worker
    process, and a run that waits for an error that was never sent waits forever.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


@contextmanager
def add_path(path: str | Path) -> Iterator[None]:
    """Turn errors in this context into UnreadableFile with the name of the file."""
    try:
        yield
    except UnreadableFile as error:
        raise UnreadableFile(f"{path}: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise UnreadableFile(f"{path}: the file cannot be opened ({reason})") from error

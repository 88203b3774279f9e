"""Errors of single examples; errors of a whole folder are `tessera.run.errors.UserError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tessera.run.errors import UserError


class UnreadableFile(ValueError):
    """A file that cannot be used, with the reason: "photos/a.png: the file is empty (0 bytes)".

    It has one argument only: an exception with more cannot be pickled on its way from a worker
    process, and a run that waits for an error that was never sent waits forever.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


@contextmanager
def guard_reading(name: object) -> Iterator[None]:
    """Turn every error in this context into UnreadableFile with the name of the file, as text.

    Between a file and a finished example, no content may raise anything else.
    """
    try:
        with add_path(name):
            yield
    except ModuleNotFoundError as error:
        raise UnreadableFile(f"{name}: it cannot be read ({error})") from error


@contextmanager
def add_path(path: object) -> Iterator[None]:
    """Do the same, except for packages that are not installed, which callers can install."""
    try:
        yield
    except UnreadableFile as error:
        known = str(error).startswith(f"{path}: ")
        raise error if known else UnreadableFile(f"{path}: {error}") from error
    except (ModuleNotFoundError, UserError):
        raise
    except OSError as error:
        reason = error.strerror or error
        raise UnreadableFile(f"{path}: the file cannot be opened ({reason})") from error
    except Exception as error:  # damaged data raise nearly every type of exception in parsers
        shown = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UnreadableFile(f"{path}: it cannot be read ({shown})") from error

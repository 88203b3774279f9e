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


DEFECTS = (TypeError, AttributeError, NameError, AssertionError, NotImplementedError)
"""Exceptions that the readers of this package never raise because of what is in a file."""


def is_defect(error: BaseException) -> bool:
    """Return whether an error is a mistake in this package, and not the content of a file.

    Other packages raise nearly every type of exception for damaged data, and NumPy and `struct`
    raise their errors without a frame of their own. So only the types in DEFECTS count, and only if
    the last Python code that was called is part of this package.
    """
    traceback = error.__traceback__
    if not isinstance(error, DEFECTS) or traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = str(traceback.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] == __name__.partition(".")[0]


@contextmanager
def guard_reading(name: object) -> Iterator[None]:
    """Turn every error in this context into UnreadableFile with the name of the file, as text.

    Between a file and a finished example, no content may raise anything else. Mistakes in this
    package (`is_defect`) are raised as they are, with a note that names the file.
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
        if str(error).startswith(f"{path}: "):
            raise
        raise UnreadableFile(f"{path}: {error}") from error
    except (ModuleNotFoundError, UserError):
        raise
    except OSError as error:
        reason = error.strerror or error
        raise UnreadableFile(f"{path}: the file cannot be opened ({reason})") from error
    except Exception as error:  # damaged data raise nearly every type of exception in parsers
        if is_defect(error):
            add_note(error, f"This happened while {path} was read.")
            raise
        shown = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise UnreadableFile(f"{path}: it cannot be read ({shown})") from error


def add_note(error: Exception, note: str) -> None:
    """Add a note to an error, once."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)

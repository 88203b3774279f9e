"""What may go wrong with one file among thousands. What is wrong with a whole folder is
`tessera.run.directory.UserError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UnreadableFile(ValueError):
    """This file cannot be used, and why: "photos/a.png: the file is empty (0 bytes)".

    One argument only: an exception with more of them does not survive the way back from a worker
    process, and a run that waits for a worker whose error could not be sent waits for ever.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """What goes wrong in here is Unreadable, and says which file it was."""
    try:
        yield
    except UnreadableFile as error:
        raise UnreadableFile(f"{path}: {error}") from error
    except OSError as error:
        raise UnreadableFile(
            f"{path}: the file cannot be opened ({error.strerror or error})"
        ) from error

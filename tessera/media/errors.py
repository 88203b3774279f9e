"""What may go wrong with one file among thousands. What is wrong with a whole folder is `tessera.folder.Refused`."""

from __future__ import annotations


class Unreadable(ValueError):
    """This file cannot be used, and why: "photos/a.png: the file is empty (0 bytes)".

    One argument only: an exception with more of them does not survive the way back from a worker process, and a run
    that waits for a worker whose error could not be sent waits for ever.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)

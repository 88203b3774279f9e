"""The error that is shown to a user as a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def printable(text: str) -> str:
    """Return a text in which control characters, such as escape sequences of a terminal, and
    characters that are no UTF-8 are escaped; lines are kept."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )


class UserError(Exception):
    """A request that cannot be carried out.

    The message states what was found, what was expected and what to do. The command line prints it
    without a traceback and exits with `exit_code`.
    """

    exit_code = 2


@contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds as UserError with the same message.

    It is for code whose errors are caused by settings or files of the user; anywhere else a
    ValueError is a defect and keeps its traceback.
    """
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error

"""The error that is shown to a user as a sentence."""

from __future__ import annotations


class UserError(Exception):
    """A request that cannot be carried out.

    The message states what was found, what was expected and what to do. The command line prints it
    without a traceback and exits with `exit_code`.
    """

    exit_code = 2

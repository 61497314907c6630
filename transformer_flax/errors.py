"""The exceptions that are meant for the user."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend: the message says what was wrong, with the value, and what to do.

    Commands print the message alone and exit with status 2; every other exception is a defect of the program and keeps
    its traceback.
    """


class Interrupted(Exception):  # noqa: N818 (no error: what was asked for)
    """A run has ended early, in good order, as a signal asked it to; the message says where it is."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal, self.exit_status = int(signal), 128 + signal


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of what is known; empty if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""

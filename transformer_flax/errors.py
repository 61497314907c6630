"""Exceptions whose messages are written for the user."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class UserError(ValueError):
    """An error that the user can fix: the message says what is wrong, with the value, and what to do.

    Commands print only the message and exit with status 2, as they do for an OSError and a lack of memory. Any other
    exception but Interrupted is a bug and keeps its traceback.
    """


class Interrupted(Exception):  # noqa: N818 (not an error)
    """The early end of a run by a signal, with its state saved. The message says where the run ended."""

    def __init__(self, message: str, signal: int):
        super().__init__(message)
        self.signal, self.exit_status = int(signal), 128 + signal


def look_up(what: str, name: str, known: Mapping[str, Any]) -> Any:
    """Returns `known[name]`. `what` says what has this name, such as a field of the config.

    Raises:
      UserError: the name is unknown; lists the known names.
    """
    if name not in known:
        raise UserError(f"{what} is {name!r}; it must be one of {', '.join(known)}")
    return known[name]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean ...?" with the closest known name, or "" if none is close."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""

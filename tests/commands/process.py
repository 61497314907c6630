"""Commands as processes of their own."""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Generator

from tests import forked
from tests.conftest import ROOT
from tests.forked import PATIENCE

ENVIRONMENT = os.environ | {
    "TERM": "dumb",
    "PYTHONUNBUFFERED": "",  # lines have to come out without its help
    "PYTHONIOENCODING": "utf-8:strict",  # as in all locales but C
}


@contextlib.contextmanager
def started(command: str, *arguments, **pipes) -> Generator[subprocess.Popen]:
    """python -m transformer_flax.<command> as it runs, started as a shell does; it does not outlive the context."""
    line = [sys.executable, "-m", f"transformer_flax.{command}", *map(str, arguments)]
    with subprocess.Popen(line, cwd=ROOT, env=ENVIRONMENT, bufsize=0, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_output(output) -> None:
    assert select.select([output], [], [], PATIENCE)[0], f"nothing came in {PATIENCE} seconds"


def run(command: str, *arguments, given: str | bytes = "") -> subprocess.CompletedProcess:
    """Runs transformer_flax.<command> to its end, `given` as its standard input; what it put out is text."""
    given = given.encode() if isinstance(given, str) else given
    return forked.run(f"transformer_flax.{command}", *arguments, given=given)


def succeeds(command: str, *arguments, given: str | bytes = "") -> subprocess.CompletedProcess:
    result = run(command, *arguments, given=given)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result


def refused(command: str, *arguments, given: str | bytes = "", out: str = "") -> str:
    """The one message of a command that the user got wrong, which put out `out` before it."""
    result = run(command, *arguments, given=given)
    assert "Traceback" not in result.stderr
    assert result.returncode == 2
    assert result.stdout == out
    before, _, message = result.stderr.partition("error: ")
    assert "error" not in before.lower() + message.lower()
    return message.strip()

"""Commands as processes of their own, as a shell starts them."""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator

from tests.conftest import ROOT

# The devices and the cache of the tests: what one process has compiled, no other needs to compile again.
ENVIRONMENT = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "TERM": "dumb",
    "PYTHONUNBUFFERED": "",  # lines have to come out without its help
}


PATIENCE = 120  # seconds, after which a test fails


@contextlib.contextmanager
def started(command: str, *arguments, **pipes) -> Iterator[subprocess.Popen]:
    """python -m transformer_flax.<command> as it runs; it does not outlive the context."""
    line = [sys.executable, "-m", f"transformer_flax.{command}", *map(str, arguments)]
    with subprocess.Popen(line, cwd=ROOT, env=ENVIRONMENT, bufsize=0, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_output(output) -> None:
    assert select.select([output], [], [], PATIENCE)[0], f"nothing came in {PATIENCE} seconds"


def run(command: str, *arguments, given: str | bytes = "") -> subprocess.CompletedProcess:
    """Runs it to its end, `given` on a pipe as its standard input; what it put out is text."""
    given = given.encode() if isinstance(given, str) else given
    pipe = subprocess.PIPE
    with started(command, *arguments, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        out, err = process.communicate(given, timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())


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

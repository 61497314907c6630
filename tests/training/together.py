"""Several processes on one machine, started as users start them, that find each other on the loopback."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from tests.commands.process import ENVIRONMENT, PATIENCE
from tests.conftest import ROOT

ENDING = 60  # seconds, within which all have ended after one has died


@contextlib.contextmanager
def together(*command, second: Sequence[str] = ()) -> Iterator[list[subprocess.Popen]]:
    """Python with these arguments in each of two processes of one device, the second with some of its own behind.

    Each is given --coordinator, --num_processes and --process_id; none outlives the context.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for index in range(2):
        place = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}"]
        line = [sys.executable, *command, *place, *(second if index else ())]
        pipe = subprocess.PIPE
        env = ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": "1"}
        processes.append(subprocess.Popen(line, cwd=ROOT, env=env, stdout=pipe, stderr=pipe))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Of each, when it has ended: (exit status, standard output, standard error); Gloo's greetings are left out."""
    deadline = time.monotonic() + PATIENCE
    results = []
    for process in processes:
        out, err = (text.decode() for text in process.communicate(timeout=deadline - time.monotonic()))
        out, err = ("".join(line for line in text.splitlines(True) if "Gloo" not in line) for text in (out, err))
        results.append((process.returncode, out, err))
    return results


def wait_for_line(process: subprocess.Popen, text: str) -> None:
    """Reads what the process puts out until a line has that text in it."""
    while line := process.stdout.readline().decode():
        if text in line:
            return
    raise AssertionError(f"it ended without saying {text!r}: {process.stderr.read().decode()}")


def kill(processes: list[subprocess.Popen], index: int) -> tuple[int, str]:
    """Kills one and waits until the other has ended, for as long as it may take; its exit status and standard error."""
    processes[index].kill()
    _, err = processes[1 - index].communicate(timeout=ENDING)
    return processes[1 - index].returncode, err.decode()

"""Several processes on one machine that find each other on the loopback."""

import contextlib
import signal
import socket
import time
from collections.abc import Generator, Sequence

from tests.forked import PATIENCE, Forked

ENDING = 60  # seconds, within which all have ended after one has died


@contextlib.contextmanager
def together(*command, second: Sequence[str] = ()) -> Generator[list[Forked]]:
    """A program in each of two processes of one device, the second with some arguments of its own behind.

    Each is given --coordinator, --num_processes and --process_id; none outlives the context.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(2):
            place = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}"]
            line = [*command, *place, *(second if index else ())]
            processes.append(stack.enter_context(Forked(*line, JAX_NUM_CPU_DEVICES="1")))
        yield processes


def ended(processes: list[Forked], began: float | None = None) -> list[tuple[int | None, str, str]]:
    """Waits for each to end; returns its exit status, standard output and standard error, without Gloo's greetings.

    They may take PATIENCE, from `began` if other processes are waited for in the meantime.
    """
    deadline = (time.monotonic() if began is None else began) + PATIENCE
    results = []
    for process in processes:
        process.wait(deadline - time.monotonic())
        texts = process.out, process.err
        out, err = ("".join(line for line in text.splitlines(True) if "Gloo" not in line) for text in texts)
        results.append((process.status, out, err))
    return results


def kill(processes: list[Forked], index: int) -> tuple[int | None, str]:
    """Kills one and waits until the other has ended, for as long as it may take; its exit status and standard error."""
    processes[index].send_signal(signal.SIGKILL)
    processes[1 - index].wait(ENDING)
    return processes[1 - index].status, processes[1 - index].err

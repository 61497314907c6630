"""Handles signals that ask a run to end."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, NoReturn

from transformer_flax.errors import Interrupted

# SIGINT: Ctrl-C. SIGTERM: systems send it before they kill a process, for example in Slurm's pre-emption. SIGHUP: a
# terminal sends it when it is closed. SIGUSR1 and SIGUSR2: often the value of Slurm's --signal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
OTHERS = tuple(number for number in SIGNALS if number != signal.SIGINT)  # Python raises SIGINT as KeyboardInterrupt


class Interruption:
    """A context manager that records a signal, so that the run can end where nothing is lost.

    A repeated signal changes nothing, because one request often reaches a process twice: from the system, and from a
    process that forwards it. Ctrl-C after any signal ends the process at once.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            self._before = handle(self._remember)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        return self.signal is not None

    def end(self, where: str) -> NoReturn:
        """Raises Interrupted, after a signal asked this process or another process of the run to end."""
        number = self.signal or signal.SIGTERM
        raise Interrupted(f"stopped by {number.name} {where}", number)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            drop_lost_output()
        if not self.asked:
            self.signal = signal.Signals(number)
            if signal.SIGINT in self._before:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                os.write(2, b"\nending where nothing is lost; Ctrl-C ends at once\n")  # print is unsafe in handlers


def handle(handler: Callable | signal.Handlers, numbers: Collection[signal.Signals] = SIGNALS) -> dict:
    """Sets a handler for signals. An ignored signal stays ignored, such as SIGHUP under nohup.

    Returns the previous handlers, by signal.
    """
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def drop_lost_output() -> None:
    """Discards output to a closed terminal or to a pipe without a reader, because writing to either would fail."""
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)  # only errors and hang-ups
        if poll.poll(0):
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)

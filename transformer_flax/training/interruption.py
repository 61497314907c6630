"""Signals that ask a run to end."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from transformer_flax.errors import Interrupted

# Ctrl-C; what systems send before they kill, Slurm's pre-emption among them; what Slurm's --signal is often set to.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Interruption:
    """A context in which a signal is remembered, for the run to end where nothing is lost; a second ends it at once."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self, where: str) -> None:
        """Ends the run if it was asked to.

        Raises:
          Interrupted: it was; the message says where the run is.
        """
        if self.signal is not None:
            raise Interrupted(f"stopped by {self.signal.name} {where}", self.signal)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = signal.Signals(number)
        for other in SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        os.write(2, b"\nending after this step; once more to end at once\n")  # print is not for signal handlers

"""Coordinates several processes that train together: sends the first process's values to all, stops all together.

Each process sees all devices, computes the same steps, and holds the same parameters or its share of them. All
processes write checkpoints together. Only the first process has other side effects, such as printing. A program that
never joins other processes is the first of one process, and all functions here cost it nothing.

A collective of the devices may wait only for a limited time. Longer waits use the key-value store that
`jax.distributed.initialize` opens between the processes.
"""

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import jax

from transformer_flax.errors import Interrupted, UserError
from transformer_flax.training.interruption import OTHERS, handle

HEARTBEAT_SECONDS = 30  # time after which JAX ends all processes if one is lost
GOODBYE_SECONDS = 5  # time that a failing process gives the other processes to fail with it
LOST = (
    "If another process has ended before, its last message says why. The same command in all processes resumes from "
    "the last checkpoint."
)
_POLL_SECONDS = 1  # signals are handled between two polls


class _Group:
    """The group of processes, seen from one of them."""

    def __init__(self, index: int, size: int, client: Any):
        self.index, self.size = index, size
        self.stop_calls = 0  # number of calls of `agreed_stop`
        self.stop_at: int | None = None  # the call of `agreed_stop` at which all processes stop
        self._client, self._published = client, 0

    def set(self, key: str, value: Any) -> None:
        self._client.key_value_set(f"{key}/value", json.dumps(value), allow_overwrite=True)
        # This key says that the value exists, however long it takes to fetch the value.
        self._client.key_value_set(key, "", allow_overwrite=True)

    def get(self, key: str) -> Any:
        """Returns the value of a key, or None if there is none."""
        try:
            return json.loads(self._client.key_value_try_get(f"{key}/value"))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def wait_for(self, key: str, seconds: float = float("inf"), meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Waits until a key has a value, and returns the value. Calls `meanwhile` every second while waiting.

        Raises:
          TimeoutError: the key has no value after this time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self._client.blocking_key_value_get(key, round(_POLL_SECONDS * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                meanwhile()
            else:
                return self.get(key)
        raise TimeoutError(key)

    def next_key(self) -> str:
        """Returns a key that is the same in all processes: a counter, as all publish values in the same order."""
        self._published += 1
        return f"published/{self._published}"

    def meet(self, name: str, value: Any = None, seconds: float = float("inf")) -> Any:
        """Waits until all processes have called `meet` with this name, and returns the first process's value."""
        if self.index == 0:
            for other in range(1, self.size):
                self.wait_for(f"{name}/{other}", seconds)
            self.set(f"{name}/0", value)
            return value
        self.set(f"{name}/{self.index}", value)
        return self.wait_for(f"{name}/0", seconds)


_group: _Group | None = None


@contextlib.contextmanager
def joined(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Generator[None]:
    """Context manager: joins this process to a group. Must be entered before anything else uses JAX's devices.

    When one process of the group dies, all processes end. If the first process fails after the others have finished,
    the others exit with its status. `coordinator` is HOST:PORT, an address of the first process, with a free port.
    `process_id` counts from 0. The arguments can be left out where the processes are started by Slurm, Open MPI,
    Kubernetes or on TPUs.
    """
    global _group
    if coordinator is not None and not coordinator.rpartition(":")[2].isdecimal():
        raise UserError(f"--coordinator={coordinator}: it must be HOST:PORT, an address of the first process")
    # This service's SIGTERM handler, in C++, would replace a handler in Python. `agreed_stop` works for any signal.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=GOODBYE_SECONDS,
        )
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        given = f"--coordinator={coordinator} --num_processes={num_processes} --process_id={process_id}"
        raise UserError(
            f"the processes do not find each other ({str(error).splitlines()[0]}); this one has {given}. Where they "
            "are not started by Slurm, Open MPI or on TPUs, give each its own "
            "--coordinator=HOST:PORT --num_processes=N --process_id=0 ... N-1"
        ) from error
    from jax._src.distributed import global_state  # the group that JAX joined; it has no public name

    state: Any = global_state
    group = _group = _Group(state.process_id, state.num_processes, state.client)
    try:
        yield
        failure = _leave(group, None, float("inf"))
    except BaseException as error:
        if _leave_after(error, group):
            sys.exit(_status(error))  # the first process prints the same message
        raise
    finally:
        _group = None
    if failure:
        sys.exit(failure["status"])  # the first process prints the message


def _leave_after(error: BaseException, group: _Group) -> bool:
    """Leaves the group after an error. Returns whether the first process has left with the same message before."""
    if isinstance(error, Interrupted) and threading.current_thread() is threading.main_thread():
        handle(signal.SIG_IGN, OTHERS)  # ignores a repeated signal while waiting for the other processes
    if isinstance(error, (UserError, Interrupted, KeyboardInterrupt, SystemExit)):
        seconds = float("inf") if isinstance(error, Interrupted) else GOODBYE_SECONDS
        with contextlib.suppress(TimeoutError, jax.errors.JaxRuntimeError):  # the others are busy, or one has died
            failure = {"message": str(error), "status": _status(error)}
            first = _leave(group, failure, seconds)
            return isinstance(error, (UserError, Interrupted)) and group.index > 0 and first == failure
    else:
        error.add_note(LOST)
    atexit.register(os._exit, _status(error))  # runs before JAX's handler, which waits for the other processes
    return False


def _leave(group: _Group, failure: dict[str, Any] | None, seconds: float) -> dict[str, Any] | None:
    """Leaves the group together with the other processes, and returns the first process's failure."""
    first = group.meet("end", failure, seconds)
    jax.distributed.shutdown()
    return first


def _status(error: BaseException) -> int:
    if isinstance(error, Interrupted):
        return error.exit_status
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, UserError):
        return 2
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def is_first() -> bool:
    """Returns whether this process is the first process, which prints and writes."""
    return _group is None or _group.index == 0


def share() -> tuple[int, int]:
    """Returns (i, n) for the i-th of n processes."""
    return (0, 1) if _group is None else (_group.index, _group.size)


def from_first(make: Callable[[], Any], check: Callable[[], None] = lambda: None) -> Any:
    """Calls `make` in the first process and returns its result, a JSON value, in all processes.

    The other processes wait as long as `make` takes, and call `check` while they wait; see `stop_asked`. If `make`
    raises a UserError or Interrupted, all processes raise it.
    """
    if _group is None:
        return make()
    key = _group.next_key()
    if is_first():
        try:
            value = make()
        except (UserError, Interrupted) as error:
            _group.set(key, {"error": str(error), "signal": getattr(error, "signal", None)})
            raise
        _group.set(key, {"value": value})
        return value
    published = _group.wait_for(key, meanwhile=check)
    if "value" in published:
        return published["value"]
    message, number = published["error"], published["signal"]
    raise UserError(message) if number is None else Interrupted(message, number)


def first_ahead(make: Callable[[], Any]) -> Any:
    """Calls `make` in the first process, and then in the other processes. All processes return together.

    The other processes find what the first process has written. If `make` raises a UserError or Interrupted in the
    first process, all processes raise it.
    """
    made = []
    from_first(lambda: made.append(make()))
    result = made[0] if made else make()
    if _group is not None:
        _group.meet(_group.next_key())
    return result


def agreed_stop(asked: bool) -> bool:
    """Returns whether to stop: True in all processes at the same call, once any process is asked to stop.

    Each process must call this function after each step, when the metrics of the previous step have been read. Each
    process must also call it after each batch of an evaluation, when the batch's sums have been read. So no process can
    make call n + 2 before the first process has finished call n. By call n + 2, all processes know what the first
    process decided in call n.
    """
    group = _group
    if group is None:
        return asked
    group.stop_calls += 1
    if group.stop_at is None and stop_asked(asked):
        group.stop_at = group.stop_calls + 2
        group.set("stop/at", group.stop_at)
    elif group.stop_at is None and group.index > 0:
        group.stop_at = group.get("stop/at")
    return group.stop_at is not None and group.stop_calls >= group.stop_at


def stop_asked(asked: bool) -> bool:
    """Returns, in the first process, whether any process is asked to stop; returns False in the other processes.

    The other processes forward their requests to the first process. Use this function for work that only the first
    process does: the other processes learn of its end from the exception that `from_first` raises.
    """
    group = _group
    if group is None:
        return asked
    if group.index == 0:
        return asked or bool(group.get("stop/asked"))
    if asked:
        group.set("stop/asked", True)
    return False

"""Processes of this machine that train a sweep's jobs, so many at a time, with the devices shared out among them."""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import IO, Protocol

from transformer_flax.ablation.jobs import Job
from transformer_flax.errors import UserError
from transformer_flax.training.interruption import OTHERS, SIGNALS

SHARE_OF_MEMORY = 0.9  # of a GPU, for all jobs on it together
TAKEN = 0.5  # of a GPU's memory: where others use more, it is not free
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "MemoryError", "std::bad_alloc", "Cannot allocate memory")
# Exit statuses of a run that a signal has stopped: with its step saved, or before it had begun.
STOPPED = {128 + number for number in SIGNALS} | {-number for number in OTHERS}
PR_SET_PDEATHSIG = 1  # of Linux's prctl
LAST = 1 << 14  # bytes of a log that are read for what went wrong


class Launcher(Protocol):
    """Gets jobs trained somewhere."""

    at_a_time: int

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes jobs on, each of which `poll` tells of once it has ended."""

    def poll(self) -> list[tuple[Job, str]]:
        """The jobs that have ended since the last time, with what went wrong, which is empty where nothing did."""
        ...

    def started(self) -> list[Job]:
        """Those that are being trained."""
        ...

    def left(self) -> int:
        """How many have not ended."""
        ...

    def stop(self) -> str:
        """Ends the jobs in good order, or leaves them; says what became of them."""
        ...


@dataclasses.dataclass(frozen=True)
class Slot:
    """A share of the machine, for one job at a time."""

    name: str
    environment: dict[str, str]
    cpus: frozenset[int]  # that it runs on; empty: any


class Local:
    """Trains jobs in processes of their own.

    They end when this process does, however it ends: after a kill -9 the kernel tells them (on Linux), and they finish
    their step and save it.

    Args:
      slots: as many as jobs at a time.
      command: of a job.
      inherited: a file that is kept open as long as any of the processes lives, to tell so by its lock.
    """

    def __init__(self, slots: Sequence[Slot], command: Callable[[Job], list[str]], inherited: IO):
        self._free, self._command, self._inherited = list(slots), command, inherited
        self.at_a_time = len(slots)
        self._waiting: list[Job] = []
        self._running: list[_Process] = []

    def submit(self, jobs: Sequence[Job]) -> None:
        self._waiting += jobs

    def started(self) -> list[Job]:
        return [process.job for process in self._running]

    def left(self) -> int:
        return len(self._waiting) + len(self._running)

    def poll(self) -> list[tuple[Job, str]]:
        ended = [process for process in self._running if process.ended()]
        for process in ended:
            self._running.remove(process)
            self._free.append(process.slot)
        while self._free and self._waiting:
            job, slot = self._waiting.pop(0), self._free.pop(0)
            self._running.append(_Process(job, slot, self._command(job), self._inherited))
        return [(process.job, process.problem()) for process in ended]

    def stop(self) -> str:
        for process in self._running:
            process.send(signal.SIGTERM)
        failed = [process for process in self._running if process.wait() not in {0} | STOPPED]
        lost = "; ".join(f"{process.job}: {process.problem()}" for process in failed)
        return f"its runs are saved but for {lost}" if lost else "its runs are saved"


class _Process:
    """A job that is being trained."""

    def __init__(self, job: Job, slot: Slot, command: list[str], inherited: IO):
        self.job, self.slot = job, slot
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            self._before = log.tell()  # what an earlier process has said
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | slot.environment,
                pass_fds=[inherited.fileno()],
                process_group=0,  # Ctrl-C is for the sweep, which tells its processes once
                preexec_fn=_die_with(os.getpid()),
            )
        if slot.cpus and sys.platform == "linux":
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(self._process.pid, slot.cpus)  # before Python has come so far as to start threads

    def ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait()

    def problem(self) -> str:
        """What went wrong, in one line."""
        return explain(self._process.returncode, last_of(self.job.log, self._before))


def _die_with(parent: int) -> Callable[[], None]:
    """Has the kernel send SIGTERM to a new process when this one ends, where the kernel is Linux.

    It is called between fork and exec, when the locks that other threads of this process held (those of the terminal's
    table, of numpy, of JAX) stay locked for ever. So it takes none: prctl is found beforehand, and nothing is imported,
    logged or printed.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended in between
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def last_of(log: pathlib.Path, start: int = 0) -> str:
    """The last part of a log, from `start` on; empty where nothing was begun."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - LAST))
        return file.read().decode(errors="replace")


def explain(status: int, said: str) -> str:
    """Why a process has ended, in one line, from its exit status (negative: a signal) and the last that it said.

    Empty if it ended well.
    """
    if status == 0:
        return ""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if sign := next((sign for sign in OUT_OF_MEMORY if sign in said), None):
        return f"out of memory ({sign})"
    if status in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "out of memory, as it seems: killed by SIGKILL"
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if told:
        return told[-1]
    if status < 0:
        known = -status in set(signal.Signals)  # real-time signals have no names
        return f"ended by {signal.Signals(-status).name if known else f'signal {-status}'}"
    return lines[-1] if lines else f"ended with status {status}"


def slots(jobs: int, devices_each: int = 0) -> list[Slot]:
    """The machine, shared out among so many jobs at a time.

    GPUs are dealt out, or shared where there are more jobs than GPUs; where there are none, the cores are.

    Args:
      jobs: at a time.
      devices_each: as many as a job asks for; 0: whatever it gets.

    Raises:
      UserError: a GPU is there and none is free, or a job gets fewer than it asks for.
    """
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be at least 1")
    gpus = _free_gpus()
    if gpus is None:
        cpus = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        return [Slot(f"CPU {i}", {}, frozenset(_deal(cpus, jobs, i)) if jobs > 1 else frozenset()) for i in range(jobs)]
    if devices_each > len(gpus) // jobs:
        raise UserError(
            f"no free device: {jobs} jobs at a time with config.parallel.num_devices={devices_each} need "
            f"{jobs * devices_each} GPUs, and there are {len(gpus)}; lower --jobs or --config.parallel.num_devices"
        )
    environments = [{"CUDA_VISIBLE_DEVICES": ",".join(_deal(gpus, jobs, i))} for i in range(jobs)]
    on_one = -(-jobs // len(gpus))
    if on_one > 1 and not {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"} & os.environ.keys():
        for environment in environments:
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{SHARE_OF_MEMORY / on_one:.3f}"
    return [Slot(f"GPU {e['CUDA_VISIBLE_DEVICES']}", e, frozenset()) for e in environments]


def _deal(things: list, hands: int, hand: int) -> list:
    """A hand of things that are dealt out evenly; one thing, in turn, where there are more hands than things."""
    return things[hand::hands] or ([things[hand % len(things)]] if things else [])


def _free_gpus() -> list[str] | None:
    """The GPUs that jobs may use; None if the machine has none, or is not to use them.

    Raises:
      UserError: others use the memory of all.
    """
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return None
    query = ["nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        table = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        if not named:
            return None
        return named.split(",")
    found = [line.split(", ") for line in table.splitlines() if line]
    if not found:
        return None
    measured = all(value.isdecimal() for _, *values in found for value in values)  # as it is not under MIG
    free = [index for index, used, total in found if not measured or int(used) < TAKEN * int(total)]
    if not free:
        told = ", ".join(f"{used} of {total} MiB of GPU {index}" for index, used, total in found)
        raise UserError(
            f"no free device: other processes use {told}; wait for them, or name the GPUs to use nevertheless in "
            "CUDA_VISIBLE_DEVICES"
        )
    return free

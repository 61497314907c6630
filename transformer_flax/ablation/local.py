"""Trains jobs as processes on this machine, several at a time, each with its share of the GPUs or cores."""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import platform
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import IO, Any

from transformer_flax.ablation.results import output_of
from transformer_flax.ablation.trials import Job
from transformer_flax.errors import UserError
from transformer_flax.files import try_lock
from transformer_flax.training.interruption import OTHERS, SIGNALS

JOBS_LOCK = ".jobs.lock"  # held by a sweep and its processes, until the last of them ends
LEFT = "the runs of an earlier sweep, which save their step"
SHARE_OF_MEMORY = 0.9  # share of a GPU's memory for all jobs on the GPU together
TAKEN = 0.5  # share of a GPU's memory; if other processes use this much, the GPU is not free
# JAX's settings of a GPU's memory; a user who sets one of them decides alone.
MEMORY = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"}
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "MemoryError", "std::bad_alloc", "Cannot allocate memory")
# Exit statuses of a run that a signal has stopped: after the run saved its step, or before the run began.
STOPPED = {128 + number for number in SIGNALS} | {-number for number in OTHERS}
PR_SET_PDEATHSIG = 1  # of Linux's prctl
LAST = 1 << 14  # bytes at the end of a log that are read to find the error


@dataclasses.dataclass(frozen=True)
class Slot:
    """A share of the machine, for one job at a time."""

    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    cpus: frozenset[int] = frozenset()  # CPU cores that the job may use; empty: all


class Local:
    """Trains jobs as processes on this machine: one at a time in each slot.

    These processes end when the sweep's process ends. On Linux this holds even after kill -9: the kernel signals the
    processes, and each finishes its step and saves it.
    """

    def __init__(self, workdir: pathlib.Path, slots: Sequence[Slot], command: Callable[[Job], list[str]]):
        self._workdir, self._free, self._command = workdir, list(slots), command
        self.at_a_time = len(slots)
        self._lock: IO | None = None  # each process keeps the file open, so the last to end releases it
        self._waiting: list[Job] = []
        self._running: dict[Job, tuple[Slot, LoggedProcess]] = {}

    def left_behind(self) -> str:
        """Names what an earlier sweep, for example a killed one, still trains in the directory; empty if nothing."""
        self._lock = self._lock or (self._workdir / JOBS_LOCK).open("a")
        return "" if try_lock(self._lock) else LEFT

    def submit(self, jobs: Sequence[Job]) -> None:
        """Accepts jobs; `poll` starts them, and reports each once it has ended."""
        self._waiting += jobs

    def started(self) -> list[Job]:
        """Returns the jobs that are being trained."""
        return list(self._running)

    def poll(self) -> list[tuple[Job, str]]:
        """Returns the jobs that have ended since the last call, each with its error, or ""."""
        ended = {job: process for job, (_, process) in self._running.items() if process.poll() is not None}
        for job in ended:
            slot, _ = self._running.pop(job)
            self._free.append(slot)
        while self._free and self._waiting:
            self._start(self._waiting.pop(0), self._free.pop(0))
        return [(job, process.problem()) for job, process in ended.items()]

    def stop(self) -> str:
        """Stops the jobs, which save their step. Returns a message that names the runs that are not saved."""
        for _, process in self._running.values():
            process.send_signal(signal.SIGTERM)
        failed = {job: process for job, (_, process) in self._running.items() if process.wait() not in {0} | STOPPED}
        if self._lock:
            self._lock.close()
        lost = "; ".join(f"{job}: {process.problem()}" for job, process in failed.items())
        return f"its runs are saved but for {lost}" if lost else "its runs are saved"

    def _start(self, job: Job, slot: Slot) -> None:
        with warnings.catch_warnings():
            # The warning is about forking beside JAX's threads. `_die_with` makes this safe.
            warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
            process = LoggedProcess(
                self._command(job),
                job.log,
                env=os.environ | slot.environment,
                pass_fds=[self._lock.fileno()] if self._lock else [],
                process_group=0,  # Ctrl-C reaches only the sweep, which signals its processes once
                preexec_fn=_die_with(os.getpid()),
            )
        if slot.cpus:
            with contextlib.suppress(ProcessLookupError):  # the process has ended
                os.sched_setaffinity(process.pid, slot.cpus)  # before Python has started any threads
        self._running[job] = slot, process


class LoggedProcess(subprocess.Popen):
    """A process that appends its output to a log. `options` are those of Popen."""

    def __init__(self, command: list[str], log: pathlib.Path, **options: Any):
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as output:
            self._start = output.tell()  # earlier processes wrote before
            super().__init__(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options)

    def problem(self) -> str:
        """Explains in one line what went wrong; empty if nothing did."""
        return explain(self.returncode, last_of(self._log, self._start))


def _die_with(parent: int) -> Callable[[], None]:
    """Makes a `preexec_fn` with which the Linux kernel sends SIGTERM to a new process when this process ends.

    It is called between fork and exec. There, locks that other threads held (of the bars, numpy and JAX) stay locked
    forever. So it takes no lock: prctl is looked up beforehand, and nothing is imported, logged or printed.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent has ended in between
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def last_of(log: pathlib.Path, start: int = 0) -> str:
    """Returns the end of a log, beginning at byte `start` or later; empty if there is no log."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - LAST))
        return file.read().decode(errors="replace")


def explain(status: int, said: str) -> str:
    """Explains in one line why a process with this exit status and last output has ended; empty if it succeeded."""
    if status == 0:
        return ""
    if status == -signal.SIGKILL:
        return "probably out of memory: killed by SIGKILL"
    _, found, message = f"\n{said}".rpartition("\nerror: ")  # a command ends right after its message
    if found and not message.startswith(OUT_OF_MEMORY):  # a full disk is RESOURCE_EXHAUSTED, too, within a message
        return " ".join(message.split())
    if sign := next((sign for sign in OUT_OF_MEMORY if sign in said), None):
        return f"out of memory ({sign})"
    if status < 0:
        return f"ended by a signal: {signal.strsignal(-status)}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with status {status}"


def slots(jobs: int, devices_each: int = 0, rows_multiple_of: int = 8) -> list[Slot]:
    """Divides the machine's GPUs among jobs, or its cores if it has no GPU.

    Each job gets `devices_each` GPUs. If this is 0, all get the same number of GPUs, as many as there are and as
    `rows_multiple_of` rows divide among. If there are more jobs than GPUs, jobs share a GPU.
    """
    gpus = _free_gpus()
    if gpus is None:
        cpus = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" and jobs > 1 else []
        return [Slot(cpus=frozenset(cpus[i::jobs] or cpus[i % max(1, len(cpus)) :][:1])) for i in range(jobs)]
    most = max(1, len(gpus) // jobs)
    if devices_each > most:
        raise UserError(
            f"no free device: {jobs} jobs at a time with config.parallel.num_devices={devices_each} need "
            f"{jobs * devices_each} GPUs, and there are {len(gpus)}; lower --jobs or --config.parallel.num_devices"
        )
    each = devices_each or next(count for count in range(most, 0, -1) if rows_multiple_of % count == 0)
    shares = [",".join(share) for share in zip(*(gpus[i::each] for i in range(each)), strict=False)]
    memory = {}
    jobs_a_gpu = -(-jobs // len(gpus))
    if jobs_a_gpu > 1 and not MEMORY & os.environ.keys():
        memory = {"XLA_CLIENT_MEM_FRACTION": f"{SHARE_OF_MEMORY / jobs_a_gpu:.3f}"}
    return [Slot({"CUDA_VISIBLE_DEVICES": shares[i % len(shares)]} | memory) for i in range(jobs)]


def _free_gpus() -> list[str] | None:
    """Returns the GPUs that jobs may use; None if there is no GPU, or the environment hides all GPUs."""
    found = [line.split(", ") for line in _query_gpus("uuid,memory.used,memory.total")]  # CUDA has its own indices
    if not found:
        return None
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    measured = all(value.isdecimal() for _, *values in found for value in values)  # false under MIG
    free = [gpu for gpu, used, total in found if not measured or int(used) < TAKEN * int(total)]
    if not free:
        usage = ", ".join(f"{used} of {total} MiB of {gpu}" for gpu, used, total in found)
        raise UserError(
            f"no free device: other processes use {usage}; wait for them, or name the GPUs to use nevertheless in "
            "CUDA_VISIBLE_DEVICES"
        )
    return free


def hardware() -> str:
    """Names the machine's GPUs, or else its cores, without allocating any."""
    if gpus := _query_gpus("name"):
        return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return f"{os.cpu_count()} x {model or platform.machine()}"


def _query_gpus(fields: str) -> list[str]:
    """Returns these fields of nvidia-smi, a line for each GPU; empty if there is none, or the environment hides all."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    return output_of(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]).splitlines()

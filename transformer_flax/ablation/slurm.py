"""Trains jobs on a cluster with Slurm: an array of Slurm jobs, through submitit.

submitit pickles the functions of its jobs into a folder of its own, <workdir>/slurm. Only the jobs read this folder.
The runs' working directories hold no pickles, and the sweep reads no pickles: a job prints its error.
"""

import contextlib
import dataclasses
import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from transformer_flax.ablation.local import JOBS_LOCK, LEFT, STOPPED, LoggedProcess
from transformer_flax.ablation.results import SLURM
from transformer_flax.ablation.trials import Job
from transformer_flax.console import counted
from transformer_flax.errors import UserError
from transformer_flax.files import try_lock

POLL = 5  # seconds
MOST_AT_A_TIME = 256
REQUEUES = 1_000  # most requeues after a time limit; a trial may need many
WARNING = 90  # seconds before the time limit at which Slurm signals a run, which then saves its step
PATIENCE = 600  # seconds that a job waits for Slurm to requeue it after a signal has stopped its run
PROBLEM = "training error: "  # begins the line in which a job prints its error
OWN_OPTIONS = ("job-name", "J")  # the sweep finds its jobs by their name

logger = logging.getLogger(__name__)


class Slurm:
    """Trains jobs in Slurm, with the methods of `local.Local`.

    The jobs continue when the sweep ends. A sweep that is started again waits until these jobs have ended, and then
    submits jobs for the unfinished trials. A job that Slurm pre-empts, or that reaches its time limit, saves its step
    and is requeued. The nodes must share `workdir`. `options` are those of sbatch, by name; True for one without value.
    `parameters` are options by submitit's names.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        command: Callable[[Job], list[str]],
        *,
        at_a_time: int,
        options: dict[str, str | bool],
        **parameters: Any,
    ):
        if missing := [program for program in ("sbatch", "srun", "squeue") if shutil.which(program) is None]:
            raise UserError(
                f"there is no Slurm here: {missing[0]} is not found; --launcher=local trains on this machine"
            )
        try:
            import submitit
        except ImportError as error:
            raise UserError('--launcher=slurm needs submitit: pip install -e ".[slurm]"') from error
        if own := sorted({name.replace("_", "-") for name in options} & set(OWN_OPTIONS)):
            raise UserError(f"--sbatch={own[0]} cannot be set: the sweep finds its jobs by their name; leave it out")
        folder = (workdir / SLURM).resolve()
        if "%" in str(folder):
            raise UserError(f"Slurm replaces what follows a % in a path: {folder.parent}; choose another --workdir")
        self.at_a_time, self._command, self._workdir = at_a_time, command, workdir
        self._queue = Queue(workdir)
        self._name = self._queue.name
        self._executor = submitit.SlurmExecutor(folder, max_num_timeout=REQUEUES)
        self._executor.update_parameters(  # options that are None are left out
            job_name=self._name,
            **parameters,
            array_parallelism=at_a_time,
            signal_delay_s=WARNING,
            additional_parameters={"requeue": True} | options,
        )
        self._submitted: dict[Job, Any] = {}  # submitit's jobs
        self._missing: list[Job] = []  # jobs that were not in the queue at the last poll

    def left_behind(self) -> str:
        if jobs := self._queue.left_behind():
            return jobs
        with (self._workdir / JOBS_LOCK).open("a") as lock:  # held by what a local sweep has left
            return "" if try_lock(lock) else LEFT

    def submit(self, jobs: Sequence[Job]) -> None:
        import submitit

        if not jobs:
            return
        try:
            with self._executor.batch():
                submitted = [self._executor.submit(Training(self._command(job), str(job.log))) for job in jobs]
        except submitit.core.utils.FailedJobError as error:  # the output of sbatch
            raise UserError(f"Slurm rejects the jobs: {' '.join(str(error).split())}") from error
        self._submitted = dict(zip(jobs, submitted, strict=True))

    def started(self) -> list[Job]:
        return [job for job, known in self._submitted.items() if self._queue.states.get(known.job_id) == "RUNNING"]

    def poll(self) -> list[tuple[Job, str]]:
        if not self._queue.ask():
            return []
        missing = [job for job, known in self._submitted.items() if known.job_id not in self._queue.states]
        ended = [job for job in missing if job in self._missing]  # a requeued job may be missing for a moment
        self._missing = missing
        return [(job, _problem(self._submitted.pop(job).stderr() or "")) for job in ended]

    def stop(self) -> str:
        return f"its jobs continue in Slurm, and the same command waits for them; scancel --name={self._name} ends them"


class Queue:
    """The jobs of a sweep in Slurm's queue, which the sweep finds by their name."""

    def __init__(self, workdir: pathlib.Path):
        folder = (workdir / SLURM).resolve()
        readable = re.sub(r"[^\w.-]", "_", folder.parent.name, flags=re.ASCII)
        self.name = f"{readable}-{zlib.crc32(str(folder).encode()):08x}"
        self.states: dict[str, str] = {}  # by the job's number
        self._has_answered = False
        self._asked = -float("inf")

    def ask(self) -> bool:
        """Updates the states, at most every POLL seconds; returns whether Slurm has answered now."""
        if time.monotonic() - self._asked < POLL:
            return False
        self._asked = time.monotonic()
        command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T %j"]
        try:
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        except subprocess.CalledProcessError as error:
            logger.warning("squeue fails: %s", error.stderr.strip())
            return False
        jobs = [line.split(maxsplit=2) for line in lines]
        self.states = {number: state for number, state, *names in jobs if names == [self.name]}
        self._has_answered = True
        return True

    def left_behind(self) -> str:
        """Names the jobs that an earlier sweep has left; empty if there are none."""
        self.ask()
        if not self._has_answered:
            raise UserError("squeue does not answer, so running jobs cannot be found; try again when it does")
        many = counted(len(self.states), "Slurm job")
        return f"{many} of an earlier sweep (scancel --name={self.name} ends them)" if self.states else ""


def require_no_jobs(workdir: pathlib.Path) -> None:
    """Checks that Slurm trains nothing in a sweep's directory, before the sweep trains there without Slurm.

    A machine without squeue cannot know.
    """
    if (workdir / SLURM).exists() and shutil.which("squeue") and (jobs := Queue(workdir).left_behind()):
        raise UserError(f"{workdir} is used by {jobs}; wait for them with --launcher=slurm")


def _problem(stderr: str) -> str:
    """Explains in one line why a job has failed, from the output of the job, Slurm and submitit; else returns ""."""
    lines = stderr.splitlines()
    if printed := [line.removeprefix(PROBLEM) for line in lines if line.startswith(PROBLEM)]:
        return printed[-1]
    if re.search(r"\boom[-_ ]?kill", stderr, re.IGNORECASE):
        return "out of memory (killed by Slurm)"
    cancelled = [line for line in lines if "CANCELLED" in line]  # the line says what cancelled the job
    errors = [line for line in lines if "error" in line.lower()]
    return (cancelled or errors or [""])[-1]


@dataclasses.dataclass
class Training:
    """The function of a Slurm job: runs the training, and passes any signal of Slurm on to it as SIGTERM.

    Slurm signals some or all processes of a job, so training may get the signal twice, which does no harm.
    """

    command: list[str]
    log: str
    _pid = 0  # process id of the training
    _stopped = False

    def __call__(self) -> int:
        """Trains, prints the error if there is one, and returns the exit status."""
        signal.signal(signal.SIGTERM, self._stop)
        process = LoggedProcess(self.command, pathlib.Path(self.log))
        self._pid = process.pid
        if self._stopped:  # the signal came before the process started
            self._stop()
        while (status := process.poll()) is None:
            time.sleep(0.2)
        until = time.monotonic() + PATIENCE
        while (self._stopped or status in STOPPED) and status and time.monotonic() < until:
            time.sleep(1)  # Slurm will kill or requeue the job, as it has announced
        if problem := process.problem():
            print(f"{PROBLEM}{problem}", file=sys.stderr)
        return status

    def checkpoint(self) -> Any:
        """Stops the training and returns the job to requeue. submitit calls this when Slurm will end the job soon."""
        import submitit

        self._stop()
        if self._pid:
            with contextlib.suppress(ChildProcessError):  # the process has ended, and __call__ has noticed
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Training(self.command, self.log))

    def _stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        del number, frame
        self._stopped = True
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

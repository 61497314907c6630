"""A sweep's jobs on a cluster with Slurm: an array of them, through submitit.

submitit pickles what its jobs call and what comes of it, in a folder of its own, <workdir>/slurm. That is a command of
train.py and its exit status; the directories of runs hold no pickles.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from transformer_flax.ablation.jobs import Job
from transformer_flax.ablation.launch import explain, last_of
from transformer_flax.data.strict_json import read_json
from transformer_flax.errors import UserError
from transformer_flax.training.workdir import write_whole

FOLDER = "slurm"
JOBS = "jobs.json"  # Slurm's number of each job, for a sweep that is started again while they go on
POLL = 5  # seconds
MOST_AT_A_TIME = 256
REQUEUES = 1_000  # after a time limit: a run may take as many of them as it needs
WARNING = 90  # seconds before the time limit, in which a run saves its step
PATIENCE = 600  # seconds, after which a job whose run was ended from outside ends too
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGUSR2)  # what Slurm sends before it kills

logger = logging.getLogger(__name__)


class Slurm:
    """Gets jobs trained by Slurm.

    They go on when the sweep ends; started again, it watches those that are queued or run. A job that Slurm pre-empts,
    or that comes to its time limit, saves its step and is queued again.

    Args:
      workdir: of the sweep; on a file system that the nodes share.
      command: of a job.
      at_a_time: jobs, at most.
      minutes: the time limit of a job.
      partition: empty for the cluster's default.
      devices: GPUs of a job.
      options: others of sbatch, by their names; True for one without a value.

    Raises:
      UserError: there is no Slurm, or no submitit.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        command: Callable[[Job], list[str]],
        *,
        at_a_time: int,
        minutes: int,
        partition: str = "",
        devices: int = 0,
        options: dict[str, str | bool] | None = None,
    ):
        require_slurm()
        import submitit

        self.at_a_time, self._command = at_a_time, command
        self._folder = (workdir / FOLDER).resolve()
        self._file = self._folder / JOBS
        self._executor = submitit.SlurmExecutor(self._folder, max_num_timeout=REQUEUES)
        parameters: dict[str, Any] = {
            "job_name": workdir.name,
            "time": minutes,
            "array_parallelism": at_a_time,
            "signal_delay_s": WARNING,
            "additional_parameters": {"requeue": True} | (options or {}),
        }
        if partition:
            parameters["partition"] = partition
        if devices:
            parameters["gpus_per_node"] = devices
        self._executor.update_parameters(**parameters)
        self._queued: dict[Job, Any] = {}  # submitit's jobs
        self._missing: set[Job] = set()  # not in the queue when it was last asked for
        self._states: dict[str, str] = {}
        self._asked = -float("inf")

    def submit(self, jobs: Sequence[Job]) -> None:
        import submitit

        known = read_json(self._file) if self._file.exists() else {}
        alive = self._ask()
        self._queued = {
            job: submitit.SlurmJob(self._folder, known[str(job)]) for job in jobs if known.get(str(job)) in alive
        }
        new = [job for job in jobs if job not in self._queued]
        if not new:
            return
        try:
            with self._executor.batch():
                submitted = [self._executor.submit(Training(self._command(job), str(job.log))) for job in new]
        except submitit.core.utils.FailedJobError as error:  # what sbatch says
            raise UserError(f"Slurm does not take the jobs: {' '.join(str(error).split())}") from error
        self._queued |= dict(zip(new, submitted, strict=True))
        write_whole(self._file, json.dumps(known | {str(job): s.job_id for job, s in self._queued.items()}, indent=1))

    def started(self) -> list[Job]:
        return [job for job, submitted in self._queued.items() if self._states.get(submitted.job_id) == "RUNNING"]

    def left(self) -> int:
        return len(self._queued)

    def poll(self) -> list[tuple[Job, str]]:
        if time.monotonic() - self._asked < POLL:
            return []
        self._asked = time.monotonic()
        self._states = self._ask()
        missing = {job for job, submitted in self._queued.items() if submitted.job_id not in self._states}
        # One that is queued anew may be out of sight for a moment; the result of one that has ended, too.
        ended = [job for job in missing if job in self._missing or self._queued[job].paths.result_pickle.exists()]
        self._missing = missing
        return [(job, _problem(job, self._queued.pop(job))) for job in ended]

    def stop(self) -> str:
        numbers = sorted({submitted.job_id.split("_")[0] for submitted in self._queued.values()})
        return f"they go on in Slurm, and the same command watches them; scancel {' '.join(numbers)} ends them"

    def _ask(self) -> dict[str, str]:
        """The states of this user's jobs, by their numbers; as before, if Slurm does not answer."""
        command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T"]
        try:
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        except subprocess.CalledProcessError as error:
            logger.warning("squeue fails: %s", error.stderr.strip())
            return self._states
        return dict(line.split() for line in lines)


def require_slurm() -> None:
    """Refuses where jobs cannot be given to Slurm.

    Raises:
      UserError: it is not there, or submitit is not.
    """
    if missing := [program for program in ("sbatch", "srun", "squeue") if shutil.which(program) is None]:
        raise UserError(f"there is no Slurm here: {missing[0]} is not found; --launcher=local trains on this machine")
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise UserError('--launcher=slurm needs submitit: pip install -e ".[slurm]"') from error


def _problem(job: Job, submitted: Any) -> str:
    """Why a job has ended, in one line; empty if it ended well."""
    said = last_of(job.log) if job.log.exists() else ""
    if submitted.paths.result_pickle.exists():
        with contextlib.suppress(Exception):
            return explain(submitted.result(), said)
    slurms = submitted.stderr() or ""
    if "oom" in slurms.lower():
        return "out of memory (killed by Slurm)"
    ends = [line for line in slurms.splitlines() if "CANCELLED" in line]  # it says by what
    errors = [line for line in slurms.splitlines() if "error" in line]
    return next(iter([*ends[-1:], *errors[-1:], "ended by Slurm"]))


@dataclasses.dataclass
class Training:
    """What a job calls: train.py, which is told once, by SIGINT, of whatever Slurm says.

    Slurm sends its signals to some or all processes of a job, some of them one after the other, and a second one would
    end a run at once, before its step is saved. So they are blocked for train.py.
    """

    command: list[str]
    log: str
    _pid = 0  # of train.py
    _told = False

    def __call__(self) -> int:
        """Trains; returns the exit status."""
        log = pathlib.Path(self.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
        with log.open("ab") as output:
            process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._pid = process.pid
        signal.signal(signal.SIGTERM, self._tell)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while (status := process.poll()) is None:
            time.sleep(0.2)
        until = time.monotonic() + PATIENCE
        while self._told and status and time.monotonic() < until:
            time.sleep(1)  # what Slurm has announced, it does: it kills, or queues the job again
        return status

    def checkpoint(self) -> Any:
        """Called when Slurm will end the job soon; what it returns is queued."""
        import submitit

        if self._pid:
            self._tell()
            with contextlib.suppress(ChildProcessError):  # it has ended, and __call__ knows
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Training(self.command, self.log))

    def _tell(self, number: int = 0, frame: FrameType | None = None) -> None:
        del number, frame
        if not self._told:
            self._told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGINT)

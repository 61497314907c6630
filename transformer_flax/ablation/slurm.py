"""Trains jobs on a cluster with Slurm: an array of Slurm jobs, through submitit.

submitit pickles what its jobs call in a folder of its own, <workdir>/slurm, which only the jobs read. Each job writes
its exit status there as JSON. Run directories hold no pickles, and the sweep reads none.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from transformer_flax.ablation.jobs import Job, Trial
from transformer_flax.ablation.launch import STOPPED, explain, last_of
from transformer_flax.errors import UserError
from transformer_flax.files import read_json, write_whole

FOLDER = "slurm"
JOBS = "jobs.json"  # Slurm's number and the log of each trial, for when the sweep is started again
POLL = 5  # seconds
MOST_AT_A_TIME = 256
REQUEUES = 1_000  # after a time limit: a trial may need many
WARNING = 90  # seconds before the time limit, in which a run saves its step
PATIENCE = 600  # seconds that a job waits for Slurm to requeue it after a signal has stopped its run
OWN_OPTIONS = ("job-name", "J")  # the sweep finds its jobs by their name

logger = logging.getLogger(__name__)


class Slurm:
    """Trains jobs in Slurm; call `require_slurm` first.

    The jobs go on when the sweep ends; started again, it watches those that are queued or running. A job that Slurm
    pre-empts, or that reaches its time limit, saves its step and is requeued.

    Args:
      workdir: of the sweep, on a file system that the nodes share.
      command: returns the command of a job.
      at_a_time: most jobs at a time.
      minutes: time limit of a job.
      partition: empty for the cluster's default.
      devices: number of GPUs of a job.
      options: more options of sbatch by name; True for one without a value.

    Raises:
      UserError: an option is the sweep's own.
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
        import submitit

        if own := sorted({name.replace("_", "-") for name in options or {}} & set(OWN_OPTIONS)):
            raise UserError(f"--sbatch={own[0]} cannot be set: the sweep finds its jobs by their name; leave it out")
        self.at_a_time, self._command = at_a_time, command
        self._workdir, self._folder = workdir, (workdir / FOLDER).resolve()
        self._file = self._folder / JOBS
        # Slurm's numbers start anew at times, and a directory may be copied, so jobs are known by name and number.
        name = re.sub(r"[^\w.-]", "_", self._folder.parent.name, flags=re.ASCII)
        self._name = f"{name}-{zlib.crc32(str(self._folder).encode()):08x}"
        self._executor = submitit.SlurmExecutor(self._folder, max_num_timeout=REQUEUES)
        parameters: dict[str, Any] = {
            "job_name": self._name,
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
        self._missing: set[Job] = set()  # from the queue when it was last polled
        self._states: dict[str, str] = {}
        self._polled = -float("inf")

    def submit(self, jobs: Sequence[Job]) -> None:
        import submitit

        known, alive = self._load_known(), self._query_states()
        if alive is None:
            raise UserError("squeue does not answer, so running jobs cannot be found; try again when it does")
        if strays := sorted(alive.keys() - {number for number, _ in known.values()}):
            raise UserError(
                f"Slurm has jobs of this sweep that {self._file} does not list, probably as the sweep was killed just "
                f"after it submitted them: end them by scancel {' '.join(strays)}, then try again"
            )
        self._states = alive
        running: dict[tuple[str, str], list[Trial]] = {}
        new = []
        for job in jobs:
            left = []
            for trial in job.trials:
                number, log = known.get(self._key(trial), ("", ""))
                running.setdefault((number, log), []).append(trial) if number in alive else left.append(trial)
            if left:
                new.append(job if len(left) == len(job.trials) else Job(tuple(left)))
        self._queued = {
            Job(tuple(trials), self._workdir / log): submitit.SlurmJob(self._folder, number)
            for (number, log), trials in running.items()
        }
        if not new:
            return
        try:
            with self._executor.batch():
                submitted = [
                    self._executor.submit(Training(self._command(job), str(job.log), str(self._folder))) for job in new
                ]
        except submitit.core.utils.FailedJobError as error:  # the output of sbatch
            raise UserError(f"Slurm rejects the jobs: {' '.join(str(error).split())}") from error
        self._queued |= dict(zip(new, submitted, strict=True))
        for job, each in self._queued.items():
            log = str(job.log.relative_to(self._workdir))
            known |= {self._key(trial): (each.job_id, log) for trial in job.trials}
        write_whole(self._file, json.dumps(known, indent=1))

    def started(self) -> list[Job]:
        return [job for job, submitted in self._queued.items() if self._states.get(submitted.job_id) == "RUNNING"]

    def left(self) -> int:
        return len(self._queued)

    def poll(self) -> list[tuple[Job, str]]:
        if time.monotonic() - self._polled < POLL:
            return []
        self._polled = time.monotonic()
        states = self._query_states()
        if states is None:
            return []
        self._states = states
        missing = {job for job, submitted in self._queued.items() if submitted.job_id not in states}
        # A requeued job may be missing for a moment, and the status of one that has ended may come late.
        ended = [job for job in missing if job in self._missing or self._attempt(job).status is not None]
        self._missing = missing
        problems = [(job, _problem(job, self._attempt(job), self._queued[job].stderr() or "")) for job in ended]
        for job in ended:
            del self._queued[job]
        return problems

    def stop(self) -> str:
        numbers = sorted({submitted.job_id.split("_")[0] for submitted in self._queued.values()})
        return f"they go on in Slurm, and the same command watches them; scancel {' '.join(numbers)} ends them"

    def _query_states(self) -> dict[str, str] | None:
        """The states of the sweep's jobs by number; None if Slurm does not answer."""
        command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T %j"]
        try:
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        except subprocess.CalledProcessError as error:
            logger.warning("squeue fails: %s", error.stderr.strip())
            return None
        jobs = [line.split(maxsplit=2) for line in lines]
        return {number: state for number, state, *name in jobs if name == [self._name]}

    def _load_known(self) -> dict[str, tuple[str, str]]:
        """The number and the log of the job of each trial that was ever submitted."""
        if not self._file.exists():
            return {}
        try:
            return {str(trial): (str(number), str(log)) for trial, (number, log) in read_json(self._file).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self._file} is damaged: {error}; move it away, once no job of the sweep is queued (squeue --me)"
            ) from error

    def _key(self, trial: Trial) -> str:
        return str(trial.path.relative_to(self._workdir))

    def _attempt(self, job: Job) -> "Attempt":
        return Attempt.read(self._folder, self._queued[job].job_id)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The last start of a job, which the job writes as JSON."""

    start: int | None = None  # of its part of the log; None: it never started
    status: int | None = None  # exit status of training, once it has ended

    @classmethod
    def read(cls, folder: pathlib.Path, number: str) -> "Attempt":
        """The attempt of a job; empty if there is none or its file is damaged."""
        try:
            found = read_json(cls._file(folder, number))
            start, status = found["start"], found["status"]
        except (OSError, ValueError, TypeError, KeyError):
            return cls()
        return cls(*(value if type(value) is int else None for value in (start, status)))

    def write(self, folder: pathlib.Path, number: str) -> None:
        write_whole(self._file(folder, number), json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def _file(folder: pathlib.Path, number: str) -> pathlib.Path:
        return folder / f"{number}_attempt.json"


def require_slurm() -> None:
    """Checks that jobs can be submitted to Slurm.

    Raises:
      UserError: Slurm or submitit is missing.
    """
    if missing := [program for program in ("sbatch", "srun", "squeue") if shutil.which(program) is None]:
        raise UserError(f"there is no Slurm here: {missing[0]} is not found; --launcher=local trains on this machine")
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise UserError('--launcher=slurm needs submitit: pip install -e ".[slurm]"') from error


def _problem(job: Job, attempt: Attempt, stderr: str) -> str:
    """Explains in one line why a job has ended; empty if it succeeded.

    Args:
      job: that has ended.
      attempt: its last.
      stderr: the output of Slurm and submitit.
    """
    if attempt.status is not None:
        return explain(attempt.status, last_of(job.log, attempt.start or 0))
    if re.search(r"\boom[-_ ]?kill", stderr, re.IGNORECASE):
        return "out of memory (killed by Slurm)"
    cancelled = [line for line in stderr.splitlines() if "CANCELLED" in line]  # says by what
    errors = [line for line in stderr.splitlines() if "error" in line.lower()]
    return next(iter([*cancelled[-1:], *errors[-1:], "ended by Slurm"]))


@dataclasses.dataclass
class Training:
    """The function of a Slurm job: runs the training, and passes any signal of Slurm on to it as SIGTERM.

    Slurm signals some or all processes of a job, so training may get the signal twice, which does no harm.
    """

    command: list[str]
    log: str
    folder: str  # of its attempt
    _pid = 0  # of the training
    _stopped = False

    def __call__(self) -> int:
        """Trains; writes the exit status and returns it."""
        import submitit

        log, folder = pathlib.Path(self.log), pathlib.Path(self.folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        number = submitit.JobEnvironment().job_id
        attempt = Attempt(start=log.stat().st_size if log.exists() else 0)
        attempt.write(folder, number)
        signal.signal(signal.SIGTERM, self._stop)
        with log.open("ab") as output:
            process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._pid = process.pid
        if self._stopped:  # before there was a process to signal
            self._stop()
        while (status := process.poll()) is None:
            time.sleep(0.2)
        until = time.monotonic() + PATIENCE
        while (self._stopped or status in STOPPED) and status and time.monotonic() < until:
            time.sleep(1)  # Slurm will kill or requeue the job, as it has announced
        dataclasses.replace(attempt, status=status).write(folder, number)
        return status

    def checkpoint(self) -> Any:
        """submitit calls this when Slurm will end the job soon, and requeues what it returns."""
        import submitit

        self._stop()
        if self._pid:
            with contextlib.suppress(ChildProcessError):  # it has ended, and __call__ knows
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Training(self.command, self.log, self.folder))

    def _stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        del number, frame
        self._stopped = True
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

"""A sweep's jobs on a cluster with Slurm: an array of them, through submitit.

submitit pickles what its jobs call, in a folder of its own, <workdir>/slurm; only the jobs read that. What becomes of a
job it writes there as JSON, beside it. The directories of runs hold no pickles, and the sweep reads none.
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

from transformer_flax.ablation.jobs import Job, Run
from transformer_flax.ablation.launch import STOPPED, explain, last_of
from transformer_flax.errors import UserError
from transformer_flax.files import read_json
from transformer_flax.training.run_directory import write_whole

FOLDER = "slurm"
JOBS = "jobs.json"  # Slurm's number for each run, and the log, for a sweep that is started again while they go on
POLL = 5  # seconds
MOST_AT_A_TIME = 256
REQUEUES = 1_000  # after a time limit: a run may take as many of them as it needs
WARNING = 90  # seconds before the time limit, in which a run saves its step
PATIENCE = 600  # seconds, after which a job whose run was ended from outside ends too
OWN_OPTIONS = ("job-name", "J")  # by its name a job is known as the sweep's

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
      UserError: there is no Slurm, or no submitit; or an option is the sweep's own.
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

        if own := sorted({name.replace("_", "-") for name in options or {}} & set(OWN_OPTIONS)):
            raise UserError(f"--sbatch={own[0]} is not free: by their name the sweep knows its jobs; leave it out")
        self.at_a_time, self._command = at_a_time, command
        self._workdir, self._folder = workdir, (workdir / FOLDER).resolve()
        self._file = self._folder / JOBS
        # Slurm counts anew at times, and a directory may be copied: a number alone does not say whose job it is.
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
        self._missing: set[Job] = set()  # not in the queue when it was last asked for
        self._states: dict[str, str] = {}
        self._asked = -float("inf")

    def submit(self, jobs: Sequence[Job]) -> None:
        import submitit

        known = self._known()
        alive = self._ask()
        if alive is None:
            raise UserError(
                "squeue does not answer, so jobs that go on cannot be told from new ones; try again when it does"
            )
        if strays := sorted(alive.keys() - {number for number, _ in known.values()}):
            raise UserError(
                f"jobs of this sweep go on in Slurm that {self._file} does not know, as of one that was killed when it "
                f"had just submitted them: scancel {' '.join(strays)} ends them, then try again"
            )
        self._states = alive
        going_on: dict[tuple[str, str], list[Run]] = {}
        new = []
        for job in jobs:
            left = []
            for run in job.runs:
                number, log = known.get(self._key(run), ("", ""))
                going_on.setdefault((number, log), []).append(run) if number in alive else left.append(run)
            if left:
                new.append(job if len(left) == len(job.runs) else Job(tuple(left)))
        self._queued = {
            Job(tuple(runs), self._workdir / log): submitit.SlurmJob(self._folder, number)
            for (number, log), runs in going_on.items()
        }
        if not new:
            return
        try:
            with self._executor.batch():
                submitted = [
                    self._executor.submit(Training(self._command(job), str(job.log), str(self._folder))) for job in new
                ]
        except submitit.core.utils.FailedJobError as error:  # what sbatch says
            raise UserError(f"Slurm does not take the jobs: {' '.join(str(error).split())}") from error
        self._queued |= dict(zip(new, submitted, strict=True))
        for job, each in self._queued.items():
            log = str(job.log.relative_to(self._workdir))
            known |= {self._key(run): (each.job_id, log) for run in job.runs}
        write_whole(self._file, json.dumps(known, indent=1))

    def started(self) -> list[Job]:
        return [job for job, submitted in self._queued.items() if self._states.get(submitted.job_id) == "RUNNING"]

    def left(self) -> int:
        return len(self._queued)

    def poll(self) -> list[tuple[Job, str]]:
        if time.monotonic() - self._asked < POLL:
            return []
        self._asked = time.monotonic()
        states = self._ask()
        if states is None:
            return []
        self._states = states
        missing = {job for job, submitted in self._queued.items() if submitted.job_id not in self._states}
        # One that is queued anew may be out of sight for a moment; the status of one that has ended, too.
        ended = [job for job in missing if job in self._missing or self._attempt(job).status is not None]
        self._missing = missing
        problems = [(job, _problem(job, self._attempt(job), self._queued[job].stderr() or "")) for job in ended]
        for job in ended:
            del self._queued[job]
        return problems

    def stop(self) -> str:
        numbers = sorted({submitted.job_id.split("_")[0] for submitted in self._queued.values()})
        return f"they go on in Slurm, and the same command watches them; scancel {' '.join(numbers)} ends them"

    def _ask(self) -> dict[str, str] | None:
        """The states of the sweep's jobs, by their numbers; None if Slurm does not answer."""
        command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T %j"]
        try:
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        except subprocess.CalledProcessError as error:
            logger.warning("squeue fails: %s", error.stderr.strip())
            return None
        jobs = [line.split(maxsplit=2) for line in lines]
        return {number: state for number, state, *name in jobs if name == [self._name]}

    def _known(self) -> dict[str, tuple[str, str]]:
        """The number and the log of the job of each run that was ever submitted."""
        if not self._file.exists():
            return {}
        try:
            return {str(run): (str(number), str(log)) for run, (number, log) in read_json(self._file).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self._file} is damaged: {error}; move it away, once no job of the sweep goes on (squeue --me)"
            ) from error

    def _key(self, run: Run) -> str:
        return str(run.path.relative_to(self._workdir))

    def _attempt(self, job: Job) -> "Attempt":
        return Attempt.read(_attempt_file(self._folder, self._queued[job].job_id))


@dataclasses.dataclass(frozen=True)
class Attempt:
    """What is known of the last time that a job was begun: plain JSON, which the job writes."""

    start: int | None = None  # where its part of the log begins; None: it was never begun
    status: int | None = None  # of train.py, once it has ended

    @classmethod
    def read(cls, file: pathlib.Path) -> "Attempt":
        """That of a job; of one that was never begun, or whose file is damaged, nothing is known."""
        try:
            found = read_json(file)
            start, status = found["start"], found["status"]
        except (OSError, ValueError, TypeError, KeyError):
            return cls()
        return cls(*(value if type(value) is int else None for value in (start, status)))

    def write(self, file: pathlib.Path) -> None:
        write_whole(file, json.dumps(dataclasses.asdict(self)))


def _attempt_file(folder: pathlib.Path, number: str) -> pathlib.Path:
    return folder / f"{number}_attempt.json"


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


def _problem(job: Job, attempt: Attempt, slurms: str) -> str:
    """Why a job has ended, in one line; empty if it ended well.

    Args:
      job: that has ended.
      attempt: the last.
      slurms: what Slurm and submitit have said.
    """
    if attempt.status is not None:
        return explain(attempt.status, last_of(job.log, attempt.start or 0))
    if re.search(r"\boom[-_ ]?kill", slurms, re.IGNORECASE):
        return "out of memory (killed by Slurm)"
    ends = [line for line in slurms.splitlines() if "CANCELLED" in line]  # it says by what
    errors = [line for line in slurms.splitlines() if "error" in line.lower()]
    return next(iter([*ends[-1:], *errors[-1:], "ended by Slurm"]))


@dataclasses.dataclass
class Training:
    """What a job calls: train.py, which is told by SIGTERM of whatever Slurm says.

    Slurm sends its signals to some or all processes of a job, so train.py may get one twice, which is the same to it.
    """

    command: list[str]
    log: str
    folder: str  # where it writes down what becomes of it
    _pid = 0  # of train.py
    _told = False

    def __call__(self) -> int:
        """Trains; writes down the exit status and returns it."""
        import submitit

        log = pathlib.Path(self.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        file = _attempt_file(pathlib.Path(self.folder), submitit.JobEnvironment().job_id)
        attempt = Attempt(start=log.stat().st_size if log.exists() else 0)
        attempt.write(file)
        signal.signal(signal.SIGTERM, self._tell)
        with log.open("ab") as output:
            process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._pid = process.pid
        if self._told:  # before there was anybody to tell
            self._tell()
        while (status := process.poll()) is None:
            time.sleep(0.2)
        until = time.monotonic() + PATIENCE
        while (self._told or status in STOPPED) and status and time.monotonic() < until:
            time.sleep(1)  # what Slurm has announced, it does: it kills, or queues the job again
        dataclasses.replace(attempt, status=status).write(file)
        return status

    def checkpoint(self) -> Any:
        """Called when Slurm will end the job soon; what it returns is queued."""
        import submitit

        self._tell()
        if self._pid:
            with contextlib.suppress(ChildProcessError):  # it has ended, and __call__ knows
                os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Training(self.command, self.log, self.folder))

    def _tell(self, number: int = 0, frame: FrameType | None = None) -> None:
        del number, frame
        self._told = True
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

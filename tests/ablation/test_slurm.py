"""What the sweep makes of what Slurm says. Its programs are small scripts here; docs/slurm.md starts the real ones."""

import pathlib
import pickle
import signal

import pytest

from configs import numbers
from transformer_flax.ablation import slurm
from transformer_flax.ablation.jobs import Job, Recipe
from transformer_flax.ablation.slurm import Attempt, Slurm
from transformer_flax.ablation.variants import make_variants
from transformer_flax.errors import UserError

SCRIPTS = {
    "srun": "exit 1",
    "sbatch": """
        [ -e {here}/count ] || echo 0 > {here}/count
        number=$(( $(cat {here}/count) + 1 )); echo $number > {here}/count
        echo "Submitted batch job $number"
    """,
    "squeue": """
        [ ! -e {here}/down ] || { echo 'cannot contact the controller' >&2; exit 1; }
        [ ! -e {here}/queue ] || cat {here}/queue
    """,
}


class Cluster:
    """A directory of a sweep, and a Slurm that says what it is told to."""

    def __init__(self, folder: pathlib.Path):
        self._here, self.workdir = folder / "bin", folder / "my sweep"
        self._here.mkdir()
        self.workdir.mkdir()
        for name, script in SCRIPTS.items():
            (self._here / name).write_text("#!/bin/sh\n" + script.replace("{here}", str(self._here)))
            (self._here / name).chmod(0o755)
        base = numbers.get_config()
        self.recipe = Recipe("configs/numbers.py", base, {}, self.workdir)
        self.runs = self.recipe.trials(make_variants(base, "E"), seeds=3)

    @property
    def submitted(self) -> int:
        count = self._here / "count"
        return int(count.read_text()) if count.exists() else 0

    def launcher(self, **options) -> Slurm:
        return Slurm(self.workdir, self.recipe.command, at_a_time=2, minutes=5, options=options)

    def queue(self, **states: str) -> None:
        """job_3="RUNNING" is a job of this sweep, with the number 3."""
        name = self.launcher()._name
        lines = [f"{number.removeprefix('job_')} {state} {name}\n" for number, state in states.items()]
        (self._here / "queue").write_text("".join(lines) + "77 RUNNING another job\n")

    def down(self, down: bool = True) -> None:
        (self._here / "down").touch() if down else (self._here / "down").unlink()

    def ended(self, job: Job, number: str, status: int | None, log: str, start: int = 0) -> None:
        job.log.parent.mkdir(exist_ok=True)
        job.log.write_text(log)
        Attempt(start, status).write(self.workdir / "slurm", number)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "POLL", 0)
    return Cluster(tmp_path)


def test_a_queue_that_cannot_be_asked_ends_no_job(cluster):
    job = Job(tuple(cluster.runs))
    launcher = cluster.launcher()
    launcher.submit([job])
    cluster.queue(job_1="RUNNING")
    assert launcher.poll() == []
    cluster.down()
    assert [launcher.poll() for _ in range(3)] == [[]] * 3
    assert launcher.started() == [job]
    cluster.down(False)
    cluster.queue()
    cluster.ended(job, "1", 0, "well")
    assert launcher.poll() == [(job, "")]
    assert launcher.left() == 0


def test_jobs_that_may_go_on_are_not_submitted_again(cluster):
    job = Job(tuple(cluster.runs))
    cluster.launcher().submit([job])
    cluster.queue(job_1="PENDING")
    (cluster.workdir / "slurm/jobs.json").unlink()  # as if killed before it was written
    with pytest.raises(UserError, match=r"Slurm has jobs of this sweep that .*jobs\.json does not list, .*scancel 1,"):
        cluster.launcher().submit([job])
    cluster.down()
    with pytest.raises(UserError, match="squeue does not answer, so running jobs cannot be found"):
        cluster.launcher().submit([job])
    assert cluster.submitted == 1


def test_jobs_that_go_on_are_known_by_their_runs(cluster):
    begun = Job(tuple(cluster.runs[:2]))
    cluster.launcher().submit([begun])
    cluster.queue(job_1="RUNNING")
    again = cluster.launcher()
    again.submit([Job(tuple(cluster.runs[1:]))])  # seed 0 has finished, and seed 2 is new
    assert cluster.submitted == 2
    watched, new = again._queued
    assert (watched.trials, watched.log) == (begun.trials[1:], begun.log)
    assert new.trials == tuple(cluster.runs[2:])
    one_by_one = cluster.launcher()
    cluster.queue(job_1="RUNNING", job_2="PENDING")
    one_by_one.submit([Job((run,)) for run in cluster.runs])
    assert cluster.submitted == 2
    assert [len(job.trials) for job in one_by_one._queued] == [2, 1]


def test_a_number_that_is_another_jobs_by_now_is_not_ours(cluster):
    job = Job(tuple(cluster.runs))
    cluster.launcher().submit([job])
    file = cluster.workdir / "slurm/jobs.json"
    file.write_text(file.read_text().replace('"1"', '"77"'))
    cluster.queue()
    cluster.launcher().submit([job])
    assert cluster.submitted == 2
    with pytest.raises(UserError, match="--sbatch=job-name cannot be set"):
        cluster.launcher(job_name="mine")


class Trap:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


def test_nothing_is_unpickled(cluster):
    job = Job(tuple(cluster.runs))
    launcher = cluster.launcher()
    launcher.submit([job])
    for name in ("result", "submitted"):
        (cluster.workdir / f"slurm/1_0_{name}.pkl").write_bytes(pickle.dumps(Trap()))
    cluster.queue()
    cluster.ended(job, "1", 2, "error: the disk is full\n")
    assert launcher.poll() == [(job, "the disk is full")]


@pytest.mark.parametrize("damage", ["[]", "nonsense", '{"E/seed0": 5}', '{"E/seed0": ["1"]}'])
def test_damaged_numbers_are_told(cluster, damage):
    (cluster.workdir / "slurm").mkdir()
    (cluster.workdir / "slurm/jobs.json").write_text(damage)
    with pytest.raises(UserError, match=r"jobs\.json is damaged: .*; move it away"):
        cluster.launcher().submit([Job(tuple(cluster.runs))])


BEFORE = "RESOURCE_EXHAUSTED: Out of memory\n"


@pytest.mark.parametrize(
    ("status", "log", "start", "slurms", "why"),
    [
        (2, f"{BEFORE}error: the disk is full\n", len(BEFORE), "", "the disk is full"),
        (2, BEFORE, 0, "", "out of memory (RESOURCE_EXHAUSTED)"),
        (-signal.SIGKILL, "", 0, "", "probably out of memory: killed by SIGKILL"),
        (
            None,
            BEFORE,
            0,
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1",
            "out of memory (killed by Slurm)",
        ),
        (None, "", 0, "slurmstepd: error: Detected 1 oom_kill event in StepId=1", "out of memory (killed by Slurm)"),
        (None, "", 0, "error: no room in the classroom", "error: no room in the classroom"),
        (None, "", 0, "PermissionError: seed0.log", "PermissionError: seed0.log"),
        (None, "", 0, "", "ended by Slurm"),
    ],
)
def test_why_a_job_has_ended_is_of_its_last_attempt(cluster, status, log, start, slurms, why):
    job = Job(tuple(cluster.runs))
    launcher = cluster.launcher()
    launcher.submit([job])
    cluster.queue()
    cluster.ended(job, "1", status, log, start)
    (cluster.workdir / "slurm/1_0_log.err").write_text(slurms)
    assert [*launcher.poll(), *launcher.poll()] == [(job, why)]

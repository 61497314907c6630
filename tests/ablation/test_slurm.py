"""The sweep understands what Slurm says. Its programs are small scripts here; docs/slurm.md starts the real ones."""

import pathlib
import pickle
import re
import signal

import pytest

from configs import numbers
from transformer_flax.ablation import slurm
from transformer_flax.ablation.local import Local
from transformer_flax.ablation.slurm import PROBLEM, Slurm, Training, require_no_jobs
from transformer_flax.ablation.trials import Job, TrialFactory
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
        self.factory = TrialFactory("configs/numbers.py", base, {}, self.workdir)
        self.runs = self.factory.trials(make_variants(base, "E"), seeds=range(3))

    @property
    def submitted(self) -> int:
        count = self._here / "count"
        return int(count.read_text()) if count.exists() else 0

    def launcher(self, **options) -> Slurm:
        return Slurm(self.workdir, self.factory.command, at_a_time=2, time=5, options=options)

    def queue(self, **states: str) -> None:
        """job_3="RUNNING" is a job of this sweep, with the number 3."""
        name = self.launcher()._name
        lines = [f"{number.removeprefix('job_')} {state} {name}\n" for number, state in states.items()]
        (self._here / "queue").write_text("".join(lines) + "77 RUNNING another job\n")

    def down(self, down: bool = True) -> None:
        (self._here / "down").touch() if down else (self._here / "down").unlink()

    def printed(self, number: str, stderr: str) -> None:
        """Writes what a job, Slurm and submitit print."""
        (self.workdir / f"slurm/{number}_0_log.err").write_text(stderr)


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
    assert launcher.poll() == []  # it may be queued again
    assert launcher.poll() == [(job, "")]
    assert launcher.poll() == []


def test_jobs_are_one_array_whose_members_wait_for_each_other(cluster):
    jobs = [Job((run,)) for run in cluster.runs]
    launcher = cluster.launcher()
    launcher.submit(jobs)
    assert cluster.submitted == 1  # as single jobs, Slurm would begin more than --jobs at a time
    [script] = (cluster.workdir / "slurm").glob("*submission.sh")
    asked = {line.removeprefix("#SBATCH --") for line in script.read_text().splitlines()}
    # Two at a time; each gets a signal 90 seconds before its limit, and is queued again.
    assert asked >= {"array=0-2%2", "signal=USR2@90", "requeue", "time=5", f"job-name={launcher._name}"}
    cluster.queue(job_1_0="RUNNING", job_1_1="PENDING", job_1_2="PENDING")
    assert launcher.poll() == []
    assert launcher.started() == jobs[:1]


def test_jobs_that_an_earlier_sweep_has_left_are_waited_for(cluster):
    cluster.launcher().submit([Job(tuple(cluster.runs))])
    cluster.queue(job_1="PENDING")
    again = cluster.launcher()
    assert re.fullmatch(
        r"1 Slurm job of an earlier sweep \(scancel --name=my_sweep-\w+ ends them\)", again.left_behind()
    )
    cluster.down()
    assert again.left_behind()  # as far as is known
    with pytest.raises(UserError, match="squeue does not answer, so running jobs cannot be found"):
        cluster.launcher().left_behind()
    cluster.down(False)
    cluster.queue()  # what is left there is another sweep's
    assert not again.left_behind()
    assert cluster.submitted == 1


def test_what_a_sweep_with_the_other_launcher_has_left_is_waited_for_or_told(cluster):
    cluster.launcher().submit([Job(tuple(cluster.runs))])
    require_no_jobs(cluster.workdir)
    cluster.queue(job_1="RUNNING")
    with pytest.raises(UserError, match=r"my sweep is used by 1 Slurm job of an earlier sweep .*; wait for them with"):
        require_no_jobs(cluster.workdir)
    cluster.queue()
    cluster.down()
    with pytest.raises(UserError, match="squeue does not answer"):
        require_no_jobs(cluster.workdir)
    cluster.down(False)
    local = Local(cluster.workdir, [], cluster.factory.command)
    assert not local.left_behind()
    assert cluster.launcher().left_behind() == "the runs of an earlier sweep, which save their step"
    local.stop()
    assert not cluster.launcher().left_behind()


def test_a_path_in_which_slurm_would_replace_something_is_refused(cluster):
    cluster.workdir = cluster.workdir.with_name("top10%users")
    with pytest.raises(UserError, match=r"Slurm replaces what follows a % in a path: .*/top10%users; choose"):
        cluster.launcher()


@pytest.mark.filterwarnings("error")  # of an array without jobs
def test_jobs_that_slurm_rejects_are_told_with_its_reason_and_none_are_no_array(cluster):
    (cluster._here / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition: fast' >&2; exit 1\n")
    cluster.launcher().submit([])
    with pytest.raises(UserError, match=r"Slurm rejects the jobs: .*invalid partition: fast"):
        cluster.launcher().submit([Job(tuple(cluster.runs))])


def test_the_name_of_jobs_cannot_be_set(cluster):
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
    cluster.printed("1", f"{PROBLEM}the disk is full\n")
    assert [*launcher.poll(), *launcher.poll()] == [(job, "the disk is full")]


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        (f"slurmstepd: error: DUE TO PREEMPTION\n{PROBLEM}the disk is full\nsubmitit ERROR\n", "the disk is full"),
        (f"{PROBLEM}no room\n{PROBLEM}the disk is full\n", "the disk is full"),  # of the last attempt
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1", "out of memory (killed by Slurm)"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1", "out of memory (killed by Slurm)"),
        ("error: step CANCELLED BY 5\nsrun: error: 1", "error: step CANCELLED BY 5"),
        ("error: no room in the classroom", "error: no room in the classroom"),
        ("PermissionError: seed0.log", "PermissionError: seed0.log"),
        ("all is well", ""),
    ],
)
def test_why_a_job_has_ended_is_told_in_a_line(cluster, stderr, why):
    job = Job(tuple(cluster.runs))
    launcher = cluster.launcher()
    launcher.submit([job])
    cluster.queue()
    cluster.printed("1", stderr)
    assert [*launcher.poll(), *launcher.poll()] == [(job, why)]


def test_a_job_prints_what_went_wrong_in_its_last_attempt(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slurm.signal, "signal", lambda *_: None)
    log = tmp_path / "base/seed0.log"
    assert Training(["sh", "-c", "echo RESOURCE_EXHAUSTED"], str(log))() == 0
    assert capsys.readouterr().err == ""
    assert Training(["sh", "-c", "echo error: the disk is full; exit 2"], str(log))() == 2
    assert capsys.readouterr().err == f"{PROBLEM}the disk is full\n"
    assert Training(["sh", "-c", "exit 7"], str(log))() == 7
    assert capsys.readouterr().err == f"{PROBLEM}ended with status 7\n"
    assert log.read_text() == "RESOURCE_EXHAUSTED\nerror: the disk is full\n"  # of all attempts


def test_a_signal_that_comes_before_the_training_has_started_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm.signal, "signal", lambda *_: None)
    monkeypatch.setattr(slurm, "PATIENCE", 0)
    training = Training(["sleep", "2"], str(tmp_path / "seed0.log"))
    training._stop()
    assert training() == -signal.SIGTERM

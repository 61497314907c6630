"""Runs share the machine, and a message says why one ended; a sweep runs in Slurm, where there is one."""

import operator
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from configs import numbers
from tests.ablation.sweeping import run, sweeping, timeless, wait_for
from tests.conftest import ROOT
from transformer_flax.ablation.local import MEMORY, Local, Slot, explain, hardware, last_of, slots
from transformer_flax.ablation.results import output_of, read
from transformer_flax.ablation.slurm import Slurm
from transformer_flax.ablation.trials import Job, Trial
from transformer_flax.ablation.variants import make_variants
from transformer_flax.errors import UserError


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    cores = os.sched_getaffinity(0)
    assert slots(1)[0].cpus == frozenset()  # any
    shared = slots(max(2, len(cores)))  # two jobs share a single core
    assert frozenset().union(*(slot.cpus for slot in shared)) == cores
    assert all(len(slot.cpus) == 1 for slot in shared + slots(len(cores) + 1))


def test_a_job_computes_on_the_gpus_and_cores_of_its_slot(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # those that the sweep may deal out
    core = max(os.sched_getaffinity(0))
    job = Job((Trial(make_variants(numbers.get_config(), "base")[0], 0, tmp_path / "base/seed0"),))
    program = "import os, time; time.sleep(0.5); print(os.environ['CUDA_VISIBLE_DEVICES'], os.sched_getaffinity(0))"
    slot = Slot({"CUDA_VISIBLE_DEVICES": "1"}, frozenset({core}))
    launcher = Local(tmp_path, [slot], lambda job: [sys.executable, "-c", program])
    launcher.submit([job])
    launcher.poll()
    wait_for(job.log, f"1 {{{core}}}\n")  # fails if it does not come
    launcher.stop()


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Lets nvidia-smi tell of GPUs that are not there; given a line for each."""

    def tell(*lines):
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", *MEMORY):
        monkeypatch.delenv(name, raising=False)
    return tell


def test_the_hardware_is_named_by_its_gpus(gpus):
    gpus("NVIDIA H200", "NVIDIA A100", "NVIDIA H200")
    assert hardware() == "2 x NVIDIA H200, 1 x NVIDIA A100"


def test_a_program_that_is_missing_or_fails_has_no_output():
    assert [output_of([name]) for name in ("echo", "false", "no-such-program")] == ["", "", ""]
    assert output_of(["echo", " two words "]) == "two words"


def seen(jobs, **arguments) -> list[str]:
    return [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots(jobs, **arguments)]


def test_gpus_are_dealt_out(gpus, monkeypatch):
    gpus(*(f"GPU-{name}, 10, 80000" for name in "0123"))
    assert seen(1) == ["GPU-0,GPU-1,GPU-2,GPU-3"]
    assert seen(2) == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    assert seen(4) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
    assert seen(2, devices_each=1) == ["GPU-0", "GPU-1"]
    assert seen(8, devices_each=1) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"] * 2
    assert not MEMORY & slots(4)[0].environment.keys()
    with pytest.raises(UserError, match=r"no free device: 2 jobs .*num_devices=4 need 8 GPUs, and there are 4"):
        slots(2, devices_each=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert seen(2) == ["2", "3"]


def test_all_jobs_get_as_many_gpus_as_their_rows_divide_among(gpus):
    gpus(*(f"{i}, 10, 80000" for i in range(7)))
    assert seen(1, rows_multiple_of=8) == ["0,1,2,3"]
    assert seen(2, rows_multiple_of=8) == ["0,1", "2,3"]
    assert seen(2, rows_multiple_of=12) == ["0,1,2", "3,4,5"]
    assert seen(9, rows_multiple_of=8) == ["0", "1", "2", "3", "4", "5", "6", "0", "1"]


def test_more_jobs_than_gpus_share_them_and_their_memory(gpus, monkeypatch):
    gpus("0, 10, 80000", "1, 10, 80000")
    shared = slots(5)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in shared] == ["0", "1", "0", "1", "0"]
    assert {slot.environment["XLA_CLIENT_MEM_FRACTION"] for slot in shared} == {"0.300"}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")  # JAX refuses both names together
    assert slots(5)[0].environment.keys() == {"CUDA_VISIBLE_DEVICES"}


def test_a_gpu_that_others_use_is_not_free(gpus):
    gpus("0, 70000, 80000", "1, 10, 80000")
    assert seen(1) == ["1"]
    gpus("MIG-0, [N/A], [N/A]")  # a part of a GPU, whose memory is not measured
    assert seen(1) == ["MIG-0"]
    gpus("0, 70000, 80000", "1, 75000, 80000")
    with pytest.raises(UserError, match="no free device: other processes use 70000 of 80000 MiB of 0, 75000 of"):
        slots(1)


def test_a_machine_without_gpus_or_with_hidden_ones_is_one_of_cores(gpus, monkeypatch):
    gpus()
    assert slots(1)[0].environment == {}
    gpus("0, 10, 80000")
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert slots(1)[0].environment == {}


@pytest.mark.parametrize(
    ("status", "said", "why"),
    [
        (0, "error: all is well", ""),
        (2, "error: old\nstep 5\nerror: another config:\n  steps\nchoose one\n", "another config: steps choose one"),
        (1, "Traceback\n  File\nValueError: what\n\n", "ValueError: what"),
        (
            1,
            "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory\nmore",
            "out of memory (RESOURCE_EXHAUSTED)",
        ),
        (2, "error: RESOURCE_EXHAUSTED: Out of memory; smaller batches\n", "out of memory (RESOURCE_EXHAUSTED)"),
        (
            2,
            "error: a checkpoint could not be written: RESOURCE_EXHAUSTED: No space left on device\n",
            "a checkpoint could not be written: RESOURCE_EXHAUSTED: No space left on device",
        ),
        (-signal.SIGKILL, "step 5\n", "probably out of memory: killed by SIGKILL"),
        (-signal.SIGSEGV, "step 5\n", "ended by a signal: Segmentation fault"),
        (143, "stopped by SIGTERM after step 5\n", "stopped by SIGTERM after step 5"),
        (7, "", "ended with status 7"),
    ],
)
def test_why_a_process_has_ended_is_told_in_a_line(status, said, why):
    assert explain(status, said) == why


def test_the_last_of_a_log_is_that_of_the_last_process(tmp_path):
    log = tmp_path / "seed0.log"
    assert last_of(log) == ""  # a job that was cancelled before it began
    log.write_text("before\nnow\n")
    assert last_of(log, len("before\n")) == "now\n"


RUN = """
import sys, time
from transformer_flax.training.interruption import Interruption

with Interruption() as interruption:
    print("begun", flush=True)
    while interruption.signal is None:
        time.sleep(0.02)
    time.sleep(0.4)  # a long step
print("saved", flush=True)
sys.exit({})
"""


@pytest.mark.parametrize(
    ("says", "fate"),
    [
        (143, "its runs are saved"),
        ("error: the disk is full", "its runs are saved but for base seed 0: the disk is full"),
    ],
)
def test_a_signal_to_all_processes_of_a_sweep_loses_no_step(tmp_path, says, fate):
    base = numbers.get_config()
    job = Job((Trial(make_variants(base, "base")[0], 0, tmp_path / "base/seed0"),))
    program = RUN.format(repr(says))
    launcher = Local(tmp_path, slots(1), lambda job: [sys.executable, "-c", program])
    assert not launcher.left_behind()
    launcher.submit([job])
    launcher.poll()
    wait_for(job.log, "begun")
    [(_, process)] = launcher._running.values()
    os.kill(process.pid, signal.SIGTERM)  # as a container's stop does
    wait_for(job.log, "ending")
    assert launcher.stop() == fate
    assert "saved" in job.log.read_text()
    assert not Local(tmp_path, [], launcher._command).left_behind()


JOB = """
import sys
from transformer_flax.ablation.slurm import Training

Training([sys.executable, "-c", sys.argv[1]], *sys.argv[2:])()
"""


def test_a_signal_to_all_processes_of_a_slurm_job_loses_no_step(tmp_path):
    log = tmp_path / "seed0.log"
    command = [sys.executable, "-c", JOB, RUN.format(143), str(log)]
    env = os.environ | {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True) as process:
        try:
            wait_for(log, "begun")
            for _ in range(2):
                os.killpg(process.pid, signal.SIGTERM)
                time.sleep(0.1)
            wait_for(log, "saved")
            assert process.poll() is None  # Slurm kills it, or queues it again
        finally:
            process.kill()


def test_slurm_is_asked_for_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no Slurm here: sbatch is not found; --launcher=local trains on this machine"):
        Slurm(tmp_path, lambda job: [], at_a_time=1, options={})


def test_slurm_trains_what_is_trained_without_it_though_the_sweep_is_left_alone(config, tmp_path):
    try:
        subprocess.run(["sinfo"], capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"there is no Slurm, as docs/slurm.md starts one ({error})")
    flags = ("--rows=base,D-drop0.0", "--launcher=slurm", "--time_limit=5", "--sbatch=cpus-per-task=1")
    with sweeping(config, tmp_path / "slurm", *flags) as process:
        process.wait_for("begins")
        process.send_signal(signal.SIGINT)
        process.wait()
        said = process.said
        assert process.status == 128 + signal.SIGINT, said
    assert re.search(r"its jobs continue in Slurm, and the same command waits for them; scancel --name=\S+ ends", said)
    status, said = run(config, tmp_path / "slurm", *flags)
    assert status == 0, said
    assert not list((tmp_path / "slurm/base").rglob("*.pkl"))
    status, said = run(config, tmp_path / "local", "--rows=base,D-drop0.0")
    assert status == 0, said
    slurm, local = (read(tmp_path / place / "results.jsonl")[1] for place in ("slurm", "local"))
    by_variant = operator.attrgetter("variant")  # which of both jobs ends first is Slurm's affair
    assert list(map(timeless, sorted(slurm, key=by_variant))) == list(map(timeless, sorted(local, key=by_variant)))
    assert len(slurm) == 2

"""Sweeps as a user meets them: real processes, that are killed, that fail, that go on."""

import contextlib
import dataclasses
import resource
import signal
import subprocess
import sys
import time

import pytest

from tests.commands.process import ENVIRONMENT, PATIENCE, ROOT
from tests.training.small import write_text
from transformer_flax.ablation.results import read

CONFIG = """
from tests.training.small import small_config

def get_config():
    return small_config(data__path={text!r}, data__cache_dir={cache!r}, steps=400, eval__every=200,
                        checkpoint__every=100, log__every=20, optimizer__warmup_steps=50)
"""
# Batches of which a single array of logits has 2^23 x 300 numbers; only what is asked for counts, not what is used.
TOO_LARGE = "large = {data.tokens_per_batch = 8388608}\n"
MEMORY = 8 << 30


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text").mkdir()
    write_text(folder / "text")
    (folder / "config.py").write_text(CONFIG.format(text=str(folder / "text"), cache=str(folder / "cache")))
    return folder / "config.py"


@contextlib.contextmanager
def sweeping(config, workdir, *arguments):
    """python -m transformer_flax.sweep as it runs, with little memory; it does not outlive the context."""
    command = [sys.executable, "-m", "transformer_flax.sweep", f"--config={config}", f"--workdir={workdir}", *arguments]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
        **pipe,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(config, workdir, *arguments) -> tuple[int, str]:
    with sweeping(config, workdir, *arguments) as process:
        said, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, said


def timeless(workdir) -> list:
    """What a sweep has found, without what the clock has to do with, and FLOPs, of which not every step is timed."""
    return [
        dataclasses.replace(result, seconds=0.0, flops=0.0, curve=[[p[0], *p[2:]] for p in result.curve])
        for result in read(workdir / "results.jsonl")[1]
    ]


@pytest.fixture(scope="module")
def swept(config, tmp_path_factory):
    """A sweep of two rows and of a variant that the memory is too small for; its directory, exit status and output."""
    workdir = tmp_path_factory.mktemp("swept") / "sweep"
    variants = config.with_name("variants.toml")
    variants.write_text(TOO_LARGE)
    return workdir, *run(config, workdir, "--rows=base,D-drop0.0", f"--variants={variants}")


def test_what_cannot_fit_into_memory_is_told_and_the_others_are_trained(swept):
    workdir, status, said = swept
    assert status == 2
    base, drop, large = read(workdir / "results.jsonl")[1]
    assert (base.status, drop.status, large.status) == ("finished", "finished", "failed")
    assert large.error.startswith("out of memory (")
    assert "large seed 0 FAILED: out of memory (" in said
    assert f"by hand: python train.py --config={ROOT}"[:20] in said
    assert "error: a run of 3 failed: large seed 0; the same command tries again" in said
    assert "Traceback" not in said.rpartition("error: ")[2]


def test_a_result_says_all_that_a_report_needs(swept):
    workdir, _, said = swept
    head, (base, drop, _) = read(workdir / "results.jsonl")
    assert head["config"]["steps"] == 400
    assert head["config"]["eval.final_average"] == 1
    assert head["command"].startswith("python -m transformer_flax.sweep --config=")
    assert (base.row, base.changes, base.seed, base.steps) == ("base", {}, 0, 400)
    assert drop.changes == {"model.dropout": 0.0}
    assert base.parameters == 300 * 16 + 3 * 16 * 2 * 32 + 2 * (2 * 16 * 16 + 32) + 5 * 32
    assert base.scores["valid"].keys() == {"loss", "accuracy", "perplexity", "bleu", "exact_match"}
    assert [point[0] for point in base.curve] == [200, 400]
    assert base.curve[-1][2:] == [base.scores["valid"][name] for name in ("perplexity", "bleu", "exact_match")]
    assert base.curve[0][1] < base.seconds < base.curve[1][1]
    assert 1e8 < base.flops < 1e10
    assert "tok:13a" in base.signature
    assert f"base seed 0 has finished in 0:{base.seconds:02.0f}: perplexity {base.curve[-1][2]:.3f}, BLEU" in said
    assert (workdir / "base/seed0/checkpoints/400").exists()
    assert "step     400/400" in (workdir / "base/seed0.log").read_text()


def test_a_sweep_that_is_stopped_and_killed_and_started_again_finds_the_same(swept, config, tmp_path):
    workdir = tmp_path / "sweep"
    log = workdir / "base/seed0.log"

    def wait_for(text: str) -> None:
        until = time.monotonic() + PATIENCE
        while not log.exists() or text not in log.read_text():
            assert time.monotonic() < until, f"{text!r} was not said"
            time.sleep(0.02)

    with sweeping(config, workdir, "--rows=base,D-drop0.0") as process:
        wait_for("step      20/400")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM with 2 of 2 runs left; its runs are saved; the same command goes on" in said
    assert "stopped by SIGTERM after step" in log.read_text()

    with sweeping(config, workdir, "--rows=base,D-drop0.0") as process:
        wait_for("resuming from step")
        process.kill()
    status, said = run(config, workdir, "--rows=base,D-drop0.0")
    assert status == 0, said
    assert "base seed 0 goes on from step" in said or "has finished before" in said
    assert log.read_text().count("resuming from step") == 2
    assert "another process trains" not in log.read_text()
    assert timeless(workdir) == timeless(swept[0])[:2]


def test_what_has_finished_is_left_alone_and_another_base_is_refused(swept, config, tmp_path):
    workdir = swept[0]
    before = (workdir / "results.jsonl").read_text()
    status, said = run(config, workdir, "--rows=base", "--dry_run")
    assert status == 0
    assert "0 runs to make" in said
    status, said = run(config, workdir, "--rows=base", "--config.steps=500", "--config.model.dropout=0.3")
    assert status == 2
    assert "is of a sweep of another base:\n  config.model.dropout: 0.2 there, 0.3 now\n  config.steps: 400" in said
    assert (workdir / "results.jsonl").read_text() == before

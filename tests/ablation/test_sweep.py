"""Sweeps as a user meets them: real processes, that are killed, that fail, that go on."""

import contextlib
import dataclasses
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

from tests.commands.process import ENVIRONMENT, PATIENCE, ROOT
from tests.training.small import write_text
from transformer_flax.ablation.results import read
from transformer_flax.training.progress import duration

CONFIG = """
from tests.training.small import small_config

def get_config():
    return small_config(data__path={text!r}, data__cache_dir={cache!r}, steps=200, eval__every=100,
                        checkpoint__every=50, log__every=10, optimizer__warmup_steps=50)
"""
# Of the logits of the larger there are 2^21 x 300, in more than one array: what is asked for counts, not what is used.
TOKENS = "data.tokens_per_batch"
BOTH, SMALL = f"--grid={TOKENS}=2097152,512", f"--grid={TOKENS}=512"
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
    """A sweep of which one run does not fit into memory; its directory, exit status and output."""
    workdir = tmp_path_factory.mktemp("swept") / "sweep"
    return workdir, *run(config, workdir, BOTH)


def test_what_cannot_fit_into_memory_is_told_and_the_others_are_trained(swept):
    workdir, status, said = swept
    assert status == 2
    large, small = read(workdir / "results.jsonl")[1]
    assert (large.status, large.error, large.scores) == ("failed", "out of memory (RESOURCE_EXHAUSTED)", {})
    assert (small.status, small.error) == ("finished", "")
    assert f"base {TOKENS}=2097152 seed 0 FAILED: out of memory (RESOURCE_EXHAUSTED)\n" in said
    assert (
        f"by hand: python train.py --config={config_of(said)} --config.eval.final_average=1 --config.{TOKENS}" in said
    )
    assert f"a run of 2 failed: base {TOKENS}=2097152 seed 0; the same command tries again" in said


def config_of(said: str) -> str:
    return re.findall(r"--config=(\S+)", said)[0]


def test_a_result_says_all_that_a_report_needs(swept):
    workdir, _, said = swept
    head, (_, result) = read(workdir / "results.jsonl")
    assert head["config"]["steps"] == 200
    assert head["config"]["eval.final_average"] == 1
    assert head["command"].startswith("python -m transformer_flax.sweep --config=")
    assert (result.variant, result.row, result.seed, result.steps) == (f"base {TOKENS}=512", "base", 0, 200)
    assert result.changes == {}  # of a base that has that value
    assert result.parameters == 300 * 16 + 3 * 16 * 2 * 32 + 2 * (2 * 16 * 16 + 32) + 5 * 32
    assert result.scores["valid"].keys() == {"loss", "accuracy", "perplexity", "bleu", "exact_match"}
    assert [point[0] for point in result.curve] == [100, 200]
    assert result.curve[-1][2:] == [result.scores["valid"][name] for name in ("perplexity", "bleu", "exact_match")]
    assert result.curve[0][1] < result.seconds < result.curve[1][1]
    assert 1e8 < result.flops < 1e10
    assert "tok:13a" in result.signature
    assert f"seed 0 has finished in {duration(result.seconds)}: perplexity {result.curve[-1][2]:.3f}, BLEU" in said
    folder = workdir / f"base,{TOKENS}=512"
    assert (folder / "seed0/checkpoints/200").exists()
    assert "step     200/200" in (folder / "seed0.log").read_text()


def test_a_sweep_that_is_stopped_and_killed_and_started_again_finds_the_same(swept, config, tmp_path):
    workdir = tmp_path / "sweep"
    log = workdir / f"base,{TOKENS}=512/seed0.log"

    def wait_for(text: str) -> None:
        until = time.monotonic() + PATIENCE
        while not log.exists() or text not in log.read_text():
            assert time.monotonic() < until, f"{text!r} was not said"
            time.sleep(0.02)

    with sweeping(config, workdir, SMALL) as process:
        wait_for("step      10/200")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM with 1 of 1 runs left; its runs are saved; the same command goes on" in said
    assert "stopped by SIGTERM after step" in log.read_text()

    with sweeping(config, workdir, SMALL) as process:
        wait_for("resuming from step")
        process.kill()
    status, said = run(config, workdir, SMALL)  # at once, while the run that is left behind saves its step
    assert status == 0, said
    assert "goes on from step" in said or "had finished before" in said
    assert log.read_text().count("resuming from step") == 2
    assert "another process trains" not in log.read_text()
    assert timeless(workdir) == timeless(swept[0])[1:]


def test_what_has_finished_is_not_to_be_made(swept, config):
    workdir = swept[0]
    before = (workdir / "results.jsonl").read_text()
    status, said = run(config, workdir, SMALL, "--dry_run")
    assert status == 0
    assert "0 runs to make" in said
    assert "as in the 1 runs that have finished" in said
    assert (workdir / "results.jsonl").read_text() == before

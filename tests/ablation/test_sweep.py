"""Sweeps as a user meets them: real processes, that are killed, that fail, that go on."""

import dataclasses
import importlib.util
import pathlib
import re
import signal
import time

import pytest

from tests.ablation.sweeping import run, stop_all, sweeping, timeless
from tests.commands.process import PATIENCE
from transformer_flax.ablation.jobs import Trial
from transformer_flax.ablation.results import Result, read
from transformer_flax.ablation.variants import make_variants
from transformer_flax.console import duration
from transformer_flax.training.loop import train
from transformer_flax.training.metrics import read_lines

# Of the logits of the larger there are 2^21 x 300, in more than one array: what is asked for counts, not what is used.
TOKENS = "data.tokens_per_batch"
BOTH, SMALL = f"--grid={TOKENS}=2097152,512", f"--grid={TOKENS}=512"


def load(config):
    """What the file of a config says."""
    spec = importlib.util.spec_from_file_location("config", config)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


@dataclasses.dataclass
class Swept:
    """A sweep that was stopped, killed, and went on to its end, beside a run that does not fit into memory."""

    workdir: pathlib.Path
    stopped: tuple[int, str]  # exit status and output
    ended: tuple[int, str]
    head: dict
    large: Result
    small: Result

    @property
    def run(self) -> pathlib.Path:
        return self.workdir / f"base,{TOKENS}=512/seed0"


@pytest.fixture(scope="module")
def swept(config, tmp_path_factory) -> Swept:
    workdir = tmp_path_factory.mktemp("swept") / "sweep"
    log = workdir / f"base,{TOKENS}=512/seed0.log"

    def wait_for(text: str) -> None:
        until = time.monotonic() + PATIENCE
        while not log.exists() or text not in log.read_text():
            assert time.monotonic() < until, f"{text!r} was not said"
            time.sleep(0.02)

    workdir.mkdir()
    (workdir / ".results.jsonl.partial").write_text("{")  # as of a sweep that was killed at its first line
    with sweeping(config, workdir, SMALL) as process:
        wait_for("step      10/200")
        stop_all(process)
        said, _ = process.communicate(timeout=PATIENCE)
    with sweeping(config, workdir, SMALL) as killed:
        wait_for("resuming from step")
        killed.kill()
    ended = run(config, workdir, BOTH)  # at once, while the run that is left behind saves its step
    head, results = read(workdir / "results.jsonl")
    large, small = sorted(results, key=lambda result: result.status)
    return Swept(workdir, (process.returncode, said), ended, head, large, small)


def test_a_sweep_that_is_stopped_lets_its_runs_save_their_step(swept):
    status, said = swept.stopped
    assert status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM with 1 of 1 runs left; its runs are saved; the same command resumes the sweep" in said
    assert re.search(r"stopped by SIGTERM after step \d\d", swept.run.with_suffix(".log").read_text())


def test_what_cannot_fit_into_memory_is_told_and_the_others_are_trained(swept):
    status, said = swept.ended
    assert status == 2
    assert (swept.large.status, swept.large.error) == ("failed", "out of memory (RESOURCE_EXHAUSTED)")
    assert swept.large.scores == {}
    assert (swept.small.status, swept.small.error) == ("finished", "")
    assert f"base {TOKENS}=2097152 seed 0 FAILED: out of memory (RESOURCE_EXHAUSTED)\n" in said
    assert f"--config.eval.final_average=1 --config.{TOKENS}=2097152 --config.name=numbers-base," in said  # by hand
    assert f"a run of 2 failed: base {TOKENS}=2097152 seed 0; the same command tries again" in said
    assert (swept.workdir / "report/report.md").exists()


def test_a_sweep_that_was_stopped_and_killed_finds_what_the_run_alone_finds(swept, config, tmp_path):
    log = swept.run.with_suffix(".log").read_text()
    assert log.count("resuming from step") == 2
    assert "another process trains" not in log
    base = load(config)
    base.eval.final_average = 1
    alone = Trial(make_variants(base, "base", axes=[f"{TOKENS}=512"])[0], 0, tmp_path / "alone")
    train(alone.variant.config, alone.path)
    assert timeless(alone.result()) == timeless(swept.small)


def test_a_result_says_all_that_a_report_needs(swept):
    head, result = swept.head, swept.small
    assert head["config"]["steps"] == 200
    assert head["config"]["eval.final_average"] == 1
    assert head["command"].startswith("python -m transformer_flax.sweep --config=")
    assert (result.variant, result.row, result.seed, result.steps) == (f"base {TOKENS}=512", "base", 0, 200)
    assert result.changes == {}  # of a base that has that value
    assert result.parameters == 300 * 16 + 3 * 16 * 2 * 32 + 2 * (2 * 16 * 16 + 32) + 5 * 32
    assert result.scores["valid"].keys() == {"loss", "accuracy", "perplexity", "bleu", "exact_match", "source_gain"}
    assert [point[0] for point in result.curve] == [100, 200]
    measured = ("perplexity", "bleu", "exact_match", "source_gain")
    assert result.curve[-1][2:] == [result.scores["valid"][name] for name in measured]
    last = read_lines(swept.run / "metrics.jsonl")[-1]
    assert "valid/perplexity" in last
    assert result.seconds == result.curve[1][1] == last["seconds"]
    assert 1e8 < result.flops < 1e10
    assert "tok:13a" in result.signature
    told = f"seed 0 has finished in {duration(result.seconds)}: perplexity {result.curve[-1][2]:.3f}, BLEU"
    assert told in swept.ended[1]
    assert "step     200/200" in swept.run.with_suffix(".log").read_text()


def test_seeds_that_are_trained_together_are_runs_of_their_own(config, tmp_path):
    arguments = ["--rows=base", "--config.steps=20", "--seeds=2", "--vectorize_seeds"]
    status, said = run(config, tmp_path / "together", *arguments, "--dry_run")
    assert status == 0
    assert said.count("python -m transformer_flax.train") == 1
    assert "--seeds=0,1" in said
    status, _ = run(config, tmp_path / "together", *arguments)
    assert status == 0
    _, results = read(tmp_path / "together/results.jsonl")
    assert [(result.seed, result.status) for result in results] == [(0, "finished"), (1, "finished")]
    assert results[0].scores["valid"]["loss"] != results[1].scores["valid"]["loss"]
    assert "2 seeds at once" in (tmp_path / "together/base/seeds0,1.log").read_text()


def test_what_has_finished_is_not_to_be_made(swept, config):
    before = (swept.workdir / "results.jsonl").read_text()
    status, said = run(config, swept.workdir, SMALL, "--dry_run")
    assert status == 0
    assert "0 runs to make" in said
    assert "as in 1 run that finished" in said
    status, said = run(config, swept.workdir, SMALL, "--config.model.dropout=0.4", "--dry_run")
    assert status == 2
    assert "is of a sweep of another base:\n  config.model.dropout: 0.2 there, 0.4 now" in said
    assert (swept.workdir / "results.jsonl").read_text() == before


def test_the_report_is_made_anew_of_the_results_alone(swept, config, tmp_path):
    (tmp_path / "results.jsonl").write_bytes((swept.workdir / "results.jsonl").read_bytes())
    status, said = run(config, tmp_path, "--report_only")
    assert (status, said.strip()) == (0, f"report: {tmp_path}/report/report.md")
    for name in ("report.md", "index.html"):
        assert (tmp_path / "report" / name).read_bytes() == (swept.workdir / "report" / name).read_bytes()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--partition=gpu", "--partition needs --launcher=slurm"),
        ("--config.seed=3", "--config.seed does nothing in a sweep: --seeds=3 trains with 0, 1 and 2"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(config, tmp_path, flag, message):
    status, said = run(config, tmp_path / "sweep", "--rows=base", flag)
    assert status == 2
    assert message in said
    assert not (tmp_path / "sweep").exists()

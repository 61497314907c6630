"""Sweeps as a user meets them: real processes, that are killed, that fail, that go on."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import pathlib
import re
import shutil
import signal
from unittest import mock

import pytest

from tests.ablation.sweeping import InProcess, run, stop_all, sweeping, timeless, wait_for
from tests.commands.process import ENVIRONMENT
from transformer_flax.ablation.expected_cost import measured_rate, show_plan
from transformer_flax.ablation.local import Local, Slot
from transformer_flax.ablation.results import Journal, Result, make_head, read
from transformer_flax.ablation.sweep import _show_scores, sweep
from transformer_flax.ablation.trials import Trial, TrialFactory
from transformer_flax.ablation.variants import make_variants
from transformer_flax.arguments import load_config
from transformer_flax.console import duration
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import Interrupted, UserError
from transformer_flax.files import read_json_lines
from transformer_flax.training.config_fields import complete
from transformer_flax.training.loop import train
from transformer_flax.training.run_directory import RunDirectory

# Of the logits of the larger there are 2^21 x 300, in more than one array: what is asked for counts, not what is used.
TOKENS = "data.tokens_per_batch"
BOTH, SMALL = f"{TOKENS}=2097152,512", f"--grid={TOKENS}=512"
LITTLE_MEMORY = ["sh", "-c", f'ulimit -v {8 << 20}; exec "$@"', "sh"]  # KiB; before a command


def load(config):
    """Loads the config that a file defines."""
    spec = importlib.util.spec_from_file_location("config", config)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


@dataclasses.dataclass
class Swept:
    """A sweep that was stopped, killed, and went on to its end, beside a run that does not fit into memory."""

    workdir: pathlib.Path
    stopped: tuple[int, str]  # exit status and output
    ended: tuple[str, str]  # message and output
    head: dict
    large: Result
    small: Result

    @property
    def run(self) -> pathlib.Path:
        return self.workdir / f"base,{TOKENS}=512/seed0"


def factory_of(config, workdir) -> TrialFactory:
    base = complete(load(config))
    base.eval.final_average = 1
    return TrialFactory(str(config), base, {"model.d_ff": 16, "eval.final_average": 1}, workdir)


def finish(config, workdir) -> tuple[str, str]:
    """Sweeps both batch sizes to the end, without a process for the sweep itself; its message and output."""
    factory = factory_of(config, workdir)
    trials = factory.trials(make_variants(factory.base, "base", axes=[BOTH]), seeds=range(1))
    launcher = Local(workdir, [Slot(ENVIRONMENT)], lambda job: [*LITTLE_MEMORY, *factory.command(job)])
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(UserError) as failed:
        sweep(trials, factory, make_head(factory.base, "python", ""), launcher)
    return str(failed.value), said.getvalue()


@pytest.fixture(scope="module")
def swept(config, tmp_path_factory) -> Swept:
    workdir = tmp_path_factory.mktemp("swept") / "sweep"
    log = workdir / f"base,{TOKENS}=512/seed0.log"

    workdir.mkdir()
    (workdir / ".results.jsonl.partial").write_text("{")  # as of a sweep that was killed at its first line
    with sweeping(config, workdir, SMALL) as process:
        wait_for(log, "step      10/200")
        stop_all(process)
        process.wait()
        stopped = process.status, process.said
    with sweeping(config, workdir, SMALL) as killed:
        wait_for(log, "resuming from step")
        killed.send_signal(signal.SIGKILL)
    ended = finish(config, workdir)  # at once, while the run that is left behind saves its step
    head, results = read(workdir / "results.jsonl")
    large, small = sorted(results, key=lambda result: result.status)
    return Swept(workdir, stopped, ended, head, large, small)


def test_a_sweep_that_is_stopped_lets_its_runs_save_their_step(swept):
    status, said = swept.stopped
    assert status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM with 1 of 1 runs left; its runs are saved; the same command resumes the sweep" in said
    assert re.search(r"stopped by SIGTERM after step \d\d", swept.run.with_suffix(".log").read_text())


def test_what_cannot_fit_into_memory_is_told_and_the_others_are_trained(swept):
    message, said = swept.ended
    assert (swept.large.status, swept.large.error) == ("failed", "out of memory (RESOURCE_EXHAUSTED)")
    assert swept.large.scores == {}
    assert (swept.small.status, swept.small.error) == ("finished", "")
    assert f"base {TOKENS}=2097152 seed 0 FAILED: out of memory (RESOURCE_EXHAUSTED)\n" in said
    assert f"--config.eval.final_average=1 --config.{TOKENS}=2097152 --config.name=numbers-base," in said  # by hand
    assert message == f"1 of 2 runs failed: base {TOKENS}=2097152 seed 0; the same command tries again"
    assert (swept.workdir / "report/report.md").exists()


def test_a_sweep_without_its_base_warns_that_the_report_has_no_effects(config, tmp_path, caplog):
    factory = factory_of(config, tmp_path / "sweep")
    grid = ["label_smoothing=0.3"]
    # The base's run counts in later sweeps, too.
    sweeps = [("D-ls0.2", (), 1), ("base", grid, 1), ("base", (), 0), ("base", grid, 0)]
    for rows, axes, warnings in sweeps:
        caplog.clear()
        trials = factory.trials(make_variants(factory.base, rows, axes=axes), seeds=range(1))
        launcher = Local(factory.workdir, [Slot(ENVIRONMENT)], lambda job: ["false"])
        with pytest.raises(UserError, match="1 of 1 run failed"):
            sweep(trials, factory, make_head(factory.base, "python", ""), launcher)
        assert caplog.text.count("no run is of the base itself") == warnings


def test_of_jobs_side_by_side_the_longest_of_each_seed_begin_first(config, tmp_path):
    factory, begun = factory_of(config, tmp_path / "sweep"), []
    trials = factory.trials(make_variants(factory.base, "base", axes=["steps=100,300,200"]), seeds=[1, 0])

    def command(job):
        begun.append((job.seeds, job.trials[0].steps))
        return ["false"]

    launcher = Local(factory.workdir, [Slot(ENVIRONMENT)] * 2, command)
    with pytest.raises(UserError, match="6 of 6 runs failed"):
        sweep(trials, factory, make_head(factory.base, "python", ""), launcher)
    assert begun == [("1", 300), ("1", 200), ("1", 100), ("0", 300), ("0", 200), ("0", 100)]


def test_a_sweep_counts_operations_only_to_order_or_estimate_and_can_be_stopped_there(config, tmp_path, monkeypatch):
    counted, factory = [], factory_of(config, tmp_path / "sweep")
    trials = factory.trials(make_variants(factory.base, "base", axes=["model.d_ff=16,32,64"]), seeds=[0])

    def count(variant):
        counted.append(variant)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("transformer_flax.ablation.sweep.assumed_flops", count)
    one, two = (Local(factory.workdir, [Slot(ENVIRONMENT)] * jobs, lambda job: ["false"]) for jobs in (1, 2))
    with pytest.raises(UserError, match="3 of 3 runs failed"):
        sweep(trials, factory, make_head(factory.base, "python", ""), one)
    assert not counted
    with pytest.raises(Interrupted, match="stopped by SIGINT before anything was started"):
        sweep(trials, factory, make_head(factory.base, "python", ""), two)
    assert len(counted) == 1


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
    assert [point["step"] for point in result.curve] == [100, 200]
    assert result.curve[-1].items() > result.scores["valid"].items()
    last = read_json_lines(swept.run / "metrics.jsonl")[-1]
    assert "valid/perplexity" in last
    assert result.seconds == result.curve[1]["seconds"] == last["seconds"]
    assert 1e8 < result.flops < 1e10
    assert "tok:13a" in result.signature
    told = f"seed 0 has finished in {duration(result.seconds)}: perplexity {result.curve[-1]['perplexity']:.3f}, BLEU"
    assert told in swept.ended[1]
    assert "step     200/200" in swept.run.with_suffix(".log").read_text()


@pytest.mark.long
def test_seeds_that_are_trained_together_are_runs_of_their_own(config, tmp_path):
    factory = factory_of(config, tmp_path / "together")
    factory.base.steps = 20
    trials = factory.trials(make_variants(factory.base, "base"), seeds=range(2))
    sweep(trials, factory, make_head(factory.base, "", ""), InProcess(), together=True)
    results = read(factory.workdir / "results.jsonl")[1]
    assert [(result.seed, result.status) for result in results] == [(0, "finished"), (1, "finished")]
    assert results[0].scores["valid"]["loss"] != results[1].scores["valid"]["loss"]


def test_a_plan_has_a_command_for_all_seeds_together(config, tmp_path):
    status, said = run(config, tmp_path / "sweep", "--rows=C-d256", "--seeds=2", "--vectorize_seeds", "--dry_run")
    assert status == 0, said
    assert said.count("python -m transformer_flax.train") == 1
    assert "--seeds=0,1" in said
    assert "--config.model.d_model=8" in said
    assert "--config.model.d_ff=16" in said  # it follows d_model in the file, and keeps the base's value here
    assert "2 runs to make" in said
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_goes_on_with_the_type_that_it_began_with(config, tmp_path):
    run_directory = RunDirectory(tmp_path / "sweep/base/seed0")
    run_directory.claim(complete(load_config(config)), {}, Tokenizer.train(["a b"], 259))
    status, said = run(config, tmp_path / "sweep", "--rows=D-drop0.0", "--config.model.dtype=auto", "--dry_run")
    assert status == 0, said
    assert "--config.model.dtype=float32" in said


def test_scores_of_a_classifier_are_those_of_its_labels_and_of_a_translator_those_of_its_text():
    results = [mock.Mock(scores={"valid": {"perplexity": 2 * n, "accuracy": n / 4, "macro_f1": n / 8}}) for n in (1, 2)]
    assert _show_scores(results) == "perplexity 2.828, accuracy 37.5%, macro-F1 18.8%"
    results = [mock.Mock(scores={"valid": {"perplexity": 2 * n, "bleu": 10 * n, "exact_match": n / 4}}) for n in (1, 2)]
    assert _show_scores(results) == "perplexity 2.828, BLEU 15.00, exact 37.5%"


def test_a_rate_that_cannot_be_measured_is_told_of():
    with pytest.raises(UserError, match=r"the rate of this machine cannot be measured \(TypeError: .*; try again"):
        measured_rate("no type")


def test_a_sweep_from_a_trained_model_has_its_vocabulary(config, finished, tmp_path):
    start = [f"--config.init_from={finished}", "--config.data.vocab_size=290"]
    status, said = run(config, tmp_path / "sweep", *start, "--rows=D-drop0.0", "--dry_run")
    assert status == 0, said
    assert "--config.data.vocab_size=300" in said
    assert "--config.data.tokenizer=bpe" in said  # for variants without init_from, too


def test_a_run_on_other_text_than_the_others_does_not_join_them(swept, config, tmp_path):
    assert swept.small.fingerprints.keys() == {"train", "valid"}
    shutil.copytree(swept.workdir, tmp_path / "sweep")
    file = tmp_path / "sweep/results.jsonl"
    file.unlink()
    before = dataclasses.replace(swept.small, seed=1, fingerprints=swept.small.fingerprints | {"valid": "0123"})
    Journal(file, swept.head).append(before)
    factory = factory_of(config, tmp_path / "sweep")
    trials = factory.trials(make_variants(factory.base, "base", axes=[f"{TOKENS}=512"]), range(1))
    with pytest.raises(UserError, match=r"seed 0 has other data \(valid\) than .* seed 1, so their scores do not comp"):
        sweep(trials, factory, make_head(factory.base, "python", ""), InProcess())
    assert read(file)[1] == [before]


def test_a_sweep_whose_results_are_lost_collects_them_from_its_runs(swept, config, tmp_path):
    shutil.copytree(swept.workdir, tmp_path / "sweep")
    file = tmp_path / "sweep/results.jsonl"
    file.unlink()
    factory = factory_of(config, tmp_path / "sweep")
    trials = factory.trials(make_variants(factory.base, "base", axes=[f"{TOKENS}=512"]), range(1))
    sweep(trials, factory, make_head(factory.base, "python", ""), InProcess())
    assert read(file)[1] == [swept.small]


def test_what_has_finished_is_not_to_be_made(swept, config, capsys):
    before = (swept.workdir / "results.jsonl").read_text()
    factory = factory_of(config, swept.workdir)
    show_plan(
        factory.trials(make_variants(factory.base, "base", axes=[f"{TOKENS}=512"]), range(1)), factory, together=False
    )
    said = capsys.readouterr().out
    assert "0 runs to make" in said
    assert "as in 1 run that finished" in said
    assert f"{swept.small.parameters:,}" in said
    factory.base.model.dropout = 0.4
    with pytest.raises(
        UserError, match=r"is of a sweep of another base:\n  config\.model\.dropout: 0\.2 there, 0\.4 now"
    ):
        show_plan([], factory, together=False)
    assert (swept.workdir / "results.jsonl").read_text() == before


def test_a_plan_has_the_parameters_that_finished_runs_have(swept, config, tmp_path, capsys):
    factory = factory_of(config, tmp_path)
    fewer = dataclasses.replace(swept.small, parameters=54_321)  # its text had fewer pieces than the vocabulary
    Journal(tmp_path / "results.jsonl", make_head(factory.base, "python", "")).append(fewer)
    variants = make_variants(factory.base, "base", axes=[f"{TOKENS}=512,256"])
    show_plan(factory.trials(variants, range(2)), factory, together=False)
    said = capsys.readouterr().out
    assert (said.count("54,321"), said.count(f"{swept.small.parameters:,}")) == (2, 2)


def test_of_a_run_that_has_begun_only_the_rest_is_to_be_made(swept, config, capsys):
    factory = factory_of(config, swept.workdir)
    trials = factory.trials(make_variants(factory.base, "base", axes=[f"{TOKENS}=512"]), range(2))
    trials[1].path.mkdir()
    half = trials[1].steps // 2
    line = {"step": half, "seconds": 1.0, "train/learning_rate": 0.1}
    (trials[1].path / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    show_plan(trials, factory, together=False)
    said = capsys.readouterr().out
    whole, left = (float(number) for number in re.findall(r"\S+e\+\d+", said)[1:3])
    assert f"at step {half:,} " in said
    assert left == pytest.approx(whole * (1 - half / trials[1].steps), rel=0.01)
    shutil.rmtree(trials[1].path)


def test_the_report_is_made_anew_of_the_results_alone(swept, config, tmp_path):
    (tmp_path / "results.jsonl").write_bytes((swept.workdir / "results.jsonl").read_bytes())
    status, said = run(config, tmp_path, "--report_only")
    assert (status, said.strip()) == (0, f"report: {tmp_path}/report/report.md")
    for name in ("report.md", "index.html"):
        assert (tmp_path / "report" / name).read_bytes() == (swept.workdir / "report" / name).read_bytes()


def test_a_report_needs_a_sweep(config, tmp_path):
    status, said = run(config, tmp_path, "--report_only")
    assert (status, said) == (2, f"error: there is no sweep in {tmp_path}: it has no results.jsonl\n")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--partition=gpu", "--partition has no effect without --launcher=slurm"),
        ("--config.seed=3", "--config.seed has no effect in a sweep: set --seeds, as in --seeds=101,102"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(config, tmp_path, flag, message):
    status, said = run(config, tmp_path / "sweep", "--rows=base", flag)
    assert status == 2
    assert message in said
    assert not (tmp_path / "sweep").exists()

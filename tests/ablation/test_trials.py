"""A sweep's runs have their directories and commands, and their metrics become results."""

import fcntl
import json
import shutil

import pytest
from ml_collections import FieldReference

from configs import numbers
from tests.ablation.test_results import HEAD
from tests.training.small import copied
from transformer_flax.ablation.expected_cost import assumed_left, estimate, show_plan
from transformer_flax.ablation.results import Journal, Result, read
from transformer_flax.ablation.sweep import sweep
from transformer_flax.ablation.trials import (
    Job,
    Trial,
    TrialFactory,
    TrialProgress,
    chosen_dtype,
    folder_name,
    make_jobs,
    measure,
    references,
)
from transformer_flax.ablation.variants import Variant, make_variants
from transformer_flax.errors import UserError
from transformer_flax.training.config_fields import differences, flatten
from transformer_flax.training.run_directory import RunDirectory


def factory(workdir, base=None, **overrides):
    base = base or numbers.get_config()
    base.update_from_flattened_dict(overrides)
    return TrialFactory("configs/numbers.py", base, overrides, workdir)


def test_the_command_of_a_run_sets_what_differs_and_nothing_else(tmp_path):
    made = factory(tmp_path, **{"eval.final_average": 1, "steps": 50})
    first, *_, last = made.trials(
        make_variants(made.base, "base,D-drop0.2", axes=["data.batching=packed"]), seeds=range(2)
    )
    assert str(last) == "D-drop0.2 data.batching=packed seed 1"
    assert last.path == tmp_path / "D-drop0.2,data.batching=packed" / "seed1"
    command = made.command(Job((last,)))
    name = "numbers-D-drop0.2,data.batching=packed-seed1"
    assert command[1:] == [
        "-m",
        "transformer_flax.train",
        "--config=configs/numbers.py",
        "--config.eval.final_average=1",
        "--config.steps=50",
        "--config.data.batching=packed",
        "--config.model.dropout=0.2",
        f"--config.name={name}",
        "--config.seed=1",
        f"--workdir={last.path}",
    ]
    assert "--config.model" not in made.shown(Job((first,)))


def test_the_signature_of_a_result_is_that_of_the_text_of_its_run(tmp_path):
    made = factory(tmp_path, **{"data.lowercase": True})
    [trial] = made.trials(make_variants(made.base, "base"), seeds=range(1))
    assert "|case:lc|" in trial.failure("stopped").signature


def test_one_command_trains_several_seeds(tmp_path):
    made = factory(tmp_path)
    runs = made.trials(make_variants(made.base, "base,E", axes=["model.max_length=512"]), seeds=range(3))
    _, job = make_jobs(runs, [], together=True)
    assert [len(job.trials) for job in make_jobs(runs, [], together=False)] == [1] * 6
    assert made.command(job)[-2:] == [f"--workdir={tmp_path / 'E,model.max_length=512'}", "--seeds=0,1,2"]
    assert not any(part.startswith("--config.seed") for part in made.command(job))
    assert job.log == tmp_path / "E,model.max_length=512" / "seeds0-2.log"


def test_only_seeds_that_resume_from_the_same_step_are_trained_together(tmp_path):
    made = factory(tmp_path)
    runs = made.trials(make_variants(made.base, "base"), seeds=range(4))
    for seed, steps in ((0, (20, 40)), (3, (40,))):
        for step in steps:
            (RunDirectory(runs[seed].path).checkpoints / str(step)).mkdir(parents=True)
    assert [job.seeds for job in make_jobs(runs, [], together=True)] == ["0,3", "1,2"]
    failed = [result(run, status="failed") for run in runs[:2]]  # of which one may have ended the other
    assert [job.seeds for job in make_jobs(runs, failed, together=True)] == ["0", "1", "2", "3"]


def test_fields_that_follow_another_one_are_found():
    base = numbers.get_config()
    width = FieldReference(128)
    base.model.d_model, base.model.d_ff, base.steps = width, 2 * width, width
    assert references(base) == ["model.d_ff", "model.d_model", "steps"]
    assert references(base.copy_and_resolve_references()) == []


def test_folders_have_harmless_and_different_names():
    names = ["base", "A-h1 model.dropout=0.2", "my run", "my,run", "../up", "..", ".hidden", "a/b", "a\\b"]
    names += ["report", "results.jsonl", "ä", "", " ", "x" * 300, "x" * 301]
    folders = [folder_name(name) for name in names]
    assert folders[:3] == ["base", "A-h1,model.dropout=0.2", "my,run"]
    assert len(set(folders)) == len(names)
    for folder in folders:
        assert folder.isascii()
        assert 0 < len(folder) < 200
        assert not folder.startswith(".")
        assert not set(folder) & set("/\\ ")
        assert folder not in ("report", "results.jsonl")


def line(step, **values):
    return {"step": step, "seconds": step / 10, **{name.replace("__", "/"): value for name, value in values.items()}}


def trained(step, rate, flops):
    rates = {"train__steps_per_second": rate, "train__flops_per_second": flops} if rate else {}
    return line(step, train__learning_rate=0.1, train__loss=100 / step, **rates)


def evaluated(step, bleu, split="valid"):
    scores = {"accuracy": 0.5, "perplexity": 2.0, "bleu": bleu, "exact_match": bleu / 200, "averaged": 1}
    return line(step, **{f"{split}__{name}": value for name, value in scores.items()})


def test_flops_are_those_of_all_steps_though_not_all_are_timed():
    # 100 FLOPs a step, then an interval that only compiled, then 300 a step.
    lines = [trained(10, 5.0, 500.0), trained(20, None, None), trained(40, 2.0, 600.0)]
    assert measure(lines, 40).flops == (10 * 100 + 20 * 300) * 40 / 30
    assert measure([trained(10, None, None)], 40).flops == 0.0


def test_scores_are_those_of_the_last_step_and_the_best_is_of_any():
    lines = [trained(10, 5.0, 500.0), evaluated(10, 30.0), trained(20, 4.0, 500.0), evaluated(20, 20.0)]
    done = measure([*lines, evaluated(20, 10.0, "test") | {"seconds": 3.5}], 20)
    assert done.scores["valid"] == {"accuracy": 0.5, "perplexity": 2.0, "bleu": 20.0, "exact_match": 0.1}
    assert done.scores["test"]["bleu"] == 10.0
    assert str(done) == "loss 5.000, BLEU 30.00"
    first, last = done.curve
    assert first == {"step": 10, "seconds": 1.0, **done.scores["valid"], "bleu": 30.0, "exact_match": 0.15}
    assert last == {"step": 20, "seconds": 2.0, **done.scores["valid"]}
    assert (done.step, done.seconds, done.loss) == (20, 3.5, 5.0)  # the last evaluation included
    assert measure(lines, 30).scores == {}
    assert str(measure([evaluated(10, 0.0)], 20)) == "exact 0.0%"
    assert str(measure([evaluated(10, 0.0) | {"valid/source_gain": 0.125}], 20)) == "exact 0.0%, source gain 0.12"
    assert str(measure([], 20)) == ""


def test_a_run_that_patience_ended_is_measured_at_its_end_until_it_is_trained_on():
    ended = [trained(20, 4.0, 500.0), evaluated(20, 20.0) | {"valid/final": 1}]
    assert measure(ended, 90).scores["valid"]["bleu"] == 20.0
    resumed = [*ended, trained(30, 4.0, 500.0)]
    assert measure(resumed, 90).scores == {}
    assert measure([*resumed, evaluated(30, 10.0) | {"valid/final": 1}], 90).scores["valid"]["bleu"] == 10.0


def test_seeds_that_are_trained_together_share_their_seconds():
    together = {"train__seeds_at_once": 4}
    begun = [line(10, train__learning_rate=0.1, **together), evaluated(20, 30.0)]
    alone = line(30, train__learning_rate=0.1)
    assert measure(begun, 30).seconds == 0.5  # of 2 seconds
    assert measure([*begun, alone], 30).seconds == 0.5 + 1.0
    assert [point["seconds"] for point in measure([*begun, alone], 30).curve] == [0.5]
    assert measure([evaluated(5, 30.0), *begun], 30).seconds == 0.5  # evaluated before the first line of training


def test_damaged_metrics_tell_nothing(tmp_path):
    made = factory(tmp_path)
    run = made.trials(make_variants(made.base, "base"), seeds=range(1))[0]
    run.path.mkdir(parents=True)
    (run.path / "metrics.jsonl").write_text('{"step": 5, "seconds": 1.0, "train/learning_rate": 0.1}\n')
    assert run.progress().step == 5
    (run.path / "metrics.jsonl").write_text("nonsense\n")
    assert run.progress() == TrialProgress()
    assert run.result() is None
    failure = run.failure("it is damaged")
    assert (failure.status, failure.error, failure.steps) == ("failed", "it is damaged", 0)
    assert failure.parameters == 700_416


def result(run, **values) -> Result:
    fields = {
        "status": "finished",
        "error": "",
        "parameters": 1,
        "flops": 1e9,
        "steps": 9,
        "seconds": 10.0,
        "scores": {},
        "signature": "",
        "curve": [],
    }
    return Result(run.variant.name, run.variant.row, run.variant.changes, run.seed, **(fields | values))


def test_runs_cost_in_proportion_to_those_that_have_finished(tmp_path):
    made = factory(tmp_path)
    base, half, longer = (
        made.trials(make_variants(made.base, "base", axes=[f"steps={steps}"]), seeds=range(1))[0]
        for steps in (1000, 500, 2000)
    )
    assert estimate([base], [], rate=1e9) == (1.0, pytest.approx(1 / 1e9 / 0.3))
    assert estimate([base], [result(base, status="failed")], rate=1e9) == estimate([base], [], rate=1e9)
    flops, seconds = estimate([base, half, longer], [result(base), result(half, flops=5e8, seconds=5.0)])
    assert flops * assumed_left(longer) == pytest.approx(2e9)
    assert seconds * assumed_left(longer) == pytest.approx(20.0)
    assert seconds * assumed_left(longer, step=1500) == pytest.approx(5.0)
    flops, _ = estimate([base, half], [result(base), result(half, flops=0.0, seconds=5.0)])
    assert flops * assumed_left(longer) == pytest.approx(2e9)


def test_a_plan_shows_that_a_failed_seed_is_trained_apart(tmp_path, capsys):
    made = factory(tmp_path)
    runs = made.trials(make_variants(made.base, "base"), seeds=range(4))
    journal = Journal(tmp_path / "results.jsonl", HEAD | {"config": flatten(made.base.to_dict())})
    journal.append(result(runs[0]))
    journal.append(result(runs[1], status="failed"))
    show_plan(runs, made, together=True)
    said = capsys.readouterr().out
    assert said.count("transformer_flax.train") == 2
    assert "--config.seed=1 " in said
    assert "--seeds=2,3\n" in said


class Nowhere:
    """Gets a job nowhere, after its first run has left scores and no config."""

    at_a_time = 1

    def __init__(self):
        self.jobs, self.seen = [], False

    def left_behind(self):
        return ""

    def submit(self, jobs):
        self.jobs = list(jobs)
        for first in [job.trials[0] for job in jobs[:1]]:
            first.path.mkdir(parents=True)
            lines = [evaluated(first.steps, 5.0, split) for split in ("valid", "test")]
            (first.path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            jobs[0].log.write_text("begun\n")

    def started(self):
        self.seen = True
        return self.jobs

    def poll(self):
        ended = [(job, "") for job in self.jobs if self.seen]
        self.jobs = [] if self.seen else self.jobs
        return ended

    def stop(self):
        return "they have ended"


@pytest.mark.parametrize(
    ("together", "why"), [(True, "it ended before its last step was evaluated"), (False, "it never began")]
)
def test_what_is_wrong_with_a_run_is_not_said_of_the_next(tmp_path, capsys, together, why):
    made = factory(tmp_path / "sweep")
    runs = made.trials(make_variants(made.base, "base"), seeds=range(2))
    head = HEAD | {"config": flatten(made.base.to_dict())}
    with pytest.raises(UserError, match="2 of 2 runs failed: base seed 0, base seed 1; the same command tries again"):
        sweep(runs, made, head, Nowhere(), together=together)
    first, second = read(made.workdir / "results.jsonl")[1]
    assert "it has no config.json" in first.error
    assert second.error == why  # and no more
    said = capsys.readouterr().out
    assert f"base seed 1 FAILED: {why}\n" in said
    assert said.count("all of it: ") == 1  # there is no log of what never began
    assert said.count("by hand: ") == (1 if together else 2)


def test_a_terminal_shows_the_means_of_the_report(tmp_path, capsys):
    made = factory(tmp_path / "sweep")
    made.workdir.mkdir()
    head = HEAD | {"config": flatten(made.base.to_dict())}
    runs = made.trials(make_variants(made.base, "base"), seeds=range(2))
    journal = Journal(made.workdir / "results.jsonl", head)
    for run, perplexity in zip(runs, (2.0, 8.0), strict=True):
        scores = {"perplexity": perplexity, "bleu": 30.0, "exact_match": 0.5}
        journal.append(result(run, scores={"valid": scores}, signature="s"))
    sweep(runs, made, head, Nowhere())
    assert "perplexity 4.000, BLEU 30.00" in capsys.readouterr().out
    assert "| base | 4.000 [" in (made.workdir / "report/report.md").read_text()


def test_two_sweeps_in_one_directory_and_one_in_a_strange_directory_are_refused(tmp_path):
    made = factory(tmp_path / "sweep")
    runs = made.trials(make_variants(made.base, "base"), seeds=range(1))
    made.workdir.mkdir()
    with (made.workdir / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another sweep runs in"):
            sweep(runs, made, HEAD, Nowhere())
    (made.workdir / "photographs").mkdir()
    (made.workdir / ".lock").touch()  # as in the directory of a run
    with pytest.raises(UserError, match="holds no sweep, but photographs"):
        sweep(runs, made, HEAD, Nowhere())


def test_the_evaluation_on_the_way_of_a_longer_run_is_no_result(tmp_path, finished):
    for name in ("metrics.jsonl", "tokenizer.json"):
        shutil.copy(finished / name, tmp_path)
    config = RunDirectory(finished).load_config()
    run = Trial(Variant("base", "base", {}, config), config.seed, tmp_path)
    kept = json.loads((finished / "config.json").read_text())
    del kept["crc32"]
    (tmp_path / "config.json").write_text(json.dumps(kept))
    assert run.result().steps == 200
    with pytest.raises(UserError, match=rf"another config \(config\.seed: {config.seed} there, 7 now\)"):
        Trial(run.variant, 7, tmp_path).result()
    kept["config"]["steps"] = 400
    (tmp_path / "config.json").write_text(json.dumps(kept))
    for file in ("metrics.jsonl", "tokenizer.json"):  # a run that has not ended is no other
        with pytest.raises(UserError, match=r"another config \(config\.steps: 400 there, 200 now\)"):
            run.result()
        (tmp_path / file).unlink()


def trial_of(workdir) -> Trial:
    config = RunDirectory(workdir).load_config()
    return Trial(Variant("base", "base", {}, config), config.seed, workdir)


def test_parameters_are_counted_with_the_vocabulary_that_the_text_gave(tmp_path, finished):
    trial = trial_of(copied(finished, tmp_path / "run", vocab_size=1_000))
    # Embeddings of 300 pieces, three attentions, two feed-forward networks and five LayerNorms.
    assert trial.result().parameters == 300 * 16 + 3 * 4 * 16 * 16 + 2 * (2 * 16 * 16 + 32) + 5 * 32


def test_a_run_that_ended_before_it_had_the_scores_of_the_test_split_has_no_result(tmp_path, finished):
    trial = trial_of(copied(finished, tmp_path / "run"))
    assert trial.result().scores.keys() == {"valid", "test"}
    lines = (trial.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (trial.path / "metrics.jsonl").write_text("".join(line for line in lines if "test/bleu" not in line))
    assert trial.progress().scores.keys() == {"valid"}
    assert trial.result() is None


def test_a_sweep_keeps_the_type_of_the_trials_that_have_begun(tmp_path, finished):
    made = factory(tmp_path / "sweep", **{"model.dtype": "auto"})
    run = made.trials(make_variants(made.base, "base"), seeds=range(2))[1]
    assert chosen_dtype(made.workdir, []) is None
    run.path.with_name("seed0").mkdir(parents=True)  # killed before it had its config
    assert chosen_dtype(made.workdir, []) is None
    run.path.symlink_to(finished)
    assert chosen_dtype(made.workdir, [run.variant]) == "float32"
    for named, chosen in (("auto", "float32"), ("bfloat16", "bfloat16")):
        (made.workdir / "results.jsonl").unlink(missing_ok=True)
        Journal(made.workdir / "results.jsonl", HEAD | {"config": {"model.dtype": named}})  # of an earlier session
        assert chosen_dtype(made.workdir, []) == chosen
    auto, chosen = ({"model.dtype": dtype} for dtype in ("auto", "float32"))
    assert differences(auto, chosen, ()) == differences(chosen, auto, ()) == []
    assert differences({"data.name": "auto"}, {"data.name": "multi30k"}, ())


def test_fields_may_differ_by_their_whole_names_or_their_section():
    theirs, ours = ({"steps": n, "steps_of_warmup": n, "eval.every": n, "evaluations": n} for n in (1, 2))
    found = differences(theirs, ours, ("steps", "eval."))
    assert found == ["config.evaluations: 1 there, 2 now", "config.steps_of_warmup: 1 there, 2 now"]


def test_the_tokenizer_that_a_config_names_counts_only_where_one_is_trained():
    theirs, ours = ({"data.tokenizer": name} for name in ("wordpiece", "bpe"))
    assert differences(theirs, ours, ())
    start = {"init_from": "runs/a"}
    assert differences(theirs | start, ours | start, ()) == []


def test_a_trial_that_is_given_its_type_does_not_choose_that_of_the_others(tmp_path, finished):
    made = factory(tmp_path / "sweep", **{"model.dtype": "auto"})
    variants = make_variants(made.base, "base", axes=["model.dtype=float32,bfloat16"])
    run = made.trials(variants, seeds=range(1))[0]
    run.path.parent.mkdir(parents=True)
    run.path.symlink_to(finished)
    assert chosen_dtype(made.workdir, variants) is None

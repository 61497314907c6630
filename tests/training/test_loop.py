"""Whole runs, small and real."""

import contextlib
import dataclasses
import json
import re
import shutil
import time
import types
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import transformer_flax
from tests.conftest import long
from tests.training.small import PAIRS, final_state, small_config, timeless, write_text
from transformer_flax.ablation.trials import measure
from transformer_flax.console import Progress, duration
from transformer_flax.errors import Interrupted, UserError
from transformer_flax.files import read_json_lines
from transformer_flax.model.registry import KINDS, init_params, make_model
from transformer_flax.model.transformer import Transformer
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.compiled import Programs
from transformer_flax.training.config_checks import model_config
from transformer_flax.training.evaluation import Evaluator, shift_of
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.loop import fit, train
from transformer_flax.training.loss import translation_loss
from transformer_flax.training.optimizer import make_optimizer
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.setup import checked_config, prepare_run, set_up_devices
from transformer_flax.training.step import TrainState, dropout_key, init_key
from transformer_flax.training.trainer import Trainer


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def run(text, tmp_path):
    """Trains in a directory of that name."""

    def run(name, **overrides):
        return train(small_config(data__path=str(text), **overrides), tmp_path / name)

    return run


DONE = {"eval__every": 0, "checkpoint__every": 2, "checkpoint__keep": 3, "log__every": 1}


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("done") / "run"
    return folder, train(small_config(data__path=str(text), **DONE), folder)


@pytest.fixture
def done(trained, tmp_path):
    """The evaluations of a finished run with the settings DONE, which lies in the directory "run"."""
    folder, evaluations = trained
    shutil.copytree(folder, tmp_path / "run")
    return evaluations


@pytest.mark.parametrize(
    "mode",
    [
        {"parallel__num_devices": 2, "accumulation_steps": 2, "optimizer__cooldown": 0.7, "data__bpe_dropout": 0.1},
        {"parallel__mode": "pmap", "parallel__num_devices": 2, "ema_decay": 0.9, "data__batching": "packed"},
        long({"optimizer__name": "muon"}),
        long({"optimizer__name": "schedule_free", "r_drop": 5.0}),
    ],
    ids=["jit, bpe-dropout", "pmap, packed", "muon", "schedule-free, r-drop"],
)
def test_n_steps_are_half_of_them_resumed_for_the_other_half(run, tmp_path, mode):
    settings = {"log__every": 2, "data__tokens_per_batch": 4096, **mode}  # 5 batches an epoch, so the end of one too
    whole = run("whole", **settings)
    expected = final_state(tmp_path / "whole", 6)
    lines = read_json_lines(tmp_path / "whole/metrics.jsonl")

    # As if it had been killed after step 5: what came behind the checkpoint of step 3 is lost, but logged.
    shutil.rmtree(tmp_path / "whole/checkpoints/6")
    resumed = run("whole", **settings)
    jax.tree.map(np.testing.assert_array_equal, expected, final_state(tmp_path / "whole", 6))
    assert resumed["valid"].outputs == whole["valid"].outputs
    restored = transformer_flax.restore(tmp_path / "whole")
    devices = mode.get("parallel__num_devices", 1)  # as in the evaluation, whose program this is
    assert restored.translate(whole["valid"].sources, num_devices=devices) == whole["valid"].outputs

    again = read_json_lines(tmp_path / "whole/metrics.jsonl")
    assert timeless(again) == timeless(lines)
    assert [line["step"] for line in again] == [2, 3, 4, 6, 6]  # 4: of a step before the checkpoint and one behind it


def test_runs_of_a_process_share_their_programs_where_they_compute_the_same(text, tmp_path, monkeypatch):
    class Other(Transformer):
        """As a notebook defines it."""

    def programs(name, **changes):
        directory = RunDirectory(tmp_path / name)
        config = checked_config(small_config(data__path=str(text), **changes), directory)
        with Progress(quiet=True) as progress:
            parallel = set_up_devices(config, progress)
            made = Programs(prepare_run(config, directory, progress), parallel, progress)
        return made.steps, made.task.decoder({})._search

    steps, search = programs("first")
    assert programs("same", seed=1, steps=9) == (steps, search)
    assert programs("other", accumulation_steps=2)[0] is not steps
    cooled, _ = programs("cooled", optimizer__cooldown=0.5)
    assert programs("cooled sooner", optimizer__cooldown=0.5, steps=4)[0] is not cooled
    monkeypatch.setitem(KINDS, "transformer", dataclasses.replace(KINDS["transformer"], module=Other))
    of_other_class = programs("another class")
    assert of_other_class[0] is not steps
    assert of_other_class[1] != search


@pytest.mark.parametrize(("mode", "buckets"), [("jit", 2), long("pmap", 1)])
def test_on_an_accelerator_all_shapes_are_compiled_before_the_first_step(
    run, tmp_path, monkeypatch, capsys, mode, buckets
):
    def compilations():
        printed = capsys.readouterr()
        [counts] = re.findall("compilations: +(.*)", printed.out + printed.err)
        return counts

    settings = {"data__tokens_per_batch": 4096, "data__num_buckets": buckets, "parallel__mode": mode, "eval__every": 0}
    settings["label_smoothing"] = 0.03  # no other test's, whose programs it would share
    timed, add_time = [], Trainer.add_time  # which leaves out steps that compile
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "add_time", lambda self, *given: timed.append(given[0]) or add_time(self, *given))
        patch.setattr(jax, "default_backend", lambda: "gpu")
        run("ahead", steps=4, **settings)
    assert timed == [1, 2, 3, 4]
    assert re.match(rf"{buckets} training, [1-9]\d* evaluation", compilations())
    run("as they come", steps=4, **settings)
    assert compilations() == "0 training, 0 evaluation, 0 translations"
    expected, state = (final_state(tmp_path / name, 4) for name in ("as they come", "ahead"))
    jax.tree.map(np.testing.assert_array_equal, expected, state)


def test_the_first_step_learns_from_the_first_batch(done, tmp_path):
    place, progress = RunDirectory(tmp_path / "run"), Progress(quiet=True)
    config = place.load_config()
    prepared = prepare_run(config, place, progress)
    model = model_config(config, prepared.tokenizer.vocab_size)
    loss_fn = jax.jit(translation_loss(make_model(model), config.label_smoothing))
    params = init_params(model, init_key(config.seed))
    key = dropout_key(TrainState.create(config.seed, params, make_optimizer(config)))

    def loss(batch):
        sums, counts = loss_fn(params, batch, key)
        return float(sums["loss"] / counts["loss"])

    logged = next(line["train/loss"] for line in read_json_lines(place.metrics_file) if "train/loss" in line)
    assert logged == pytest.approx(loss(prepared.train[0]), rel=1e-5)
    assert logged != pytest.approx(loss(prepared.train[1]), rel=1e-4)


def test_sharded_parameters_learn_the_same_also_where_a_run_goes_on_with_or_without(run, tmp_path):
    whole = {"eval__every": 0, "eval__final_average": 2, "parallel__num_devices": 2}
    whole["seed"] = 18  # whose source gain, the difference of two losses of about 6, is not near zero
    sharded = whole | {"parallel__shard_params": True, "parallel__num_devices": 4}
    expected = run("whole", **whole)
    measured = {"sharded": run("sharded", **sharded)}
    for begun, name, settings in (("whole", "sharded later", sharded), ("sharded", "whole later", whole)):
        shutil.copytree(tmp_path / begun, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints/6")
        measured[name] = run(name, **settings)

    state = final_state(tmp_path / "whole", 6)
    for name, evaluations in measured.items():
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), final_state(tmp_path / name, 6), state
        )
        assert evaluations["valid"].scalars == pytest.approx(expected["valid"].scalars, rel=1e-4)
        assert evaluations["valid"].outputs == expected["valid"].outputs


def test_a_working_directory_holds_all_that_the_design_names(run, tmp_path, capsys):
    evaluations = run("run", eval__test=True, eval__final_sentences=7)
    assert {split: len(evaluation.outputs) for split, evaluation in evaluations.items()} == {"valid": 7, "test": 7}
    for name in ("sources", "references", "outputs"):
        assert f"{name}=" not in repr(evaluations)  # which a notebook shows
    printed = capsys.readouterr().out
    assert "translations: of at most the first 7 of each split" in printed
    workdir = tmp_path / "run"
    assert json.loads((workdir / "config.json").read_text())["config"]["model"]["d_model"] == 16
    assert (workdir / "tokenizer.json").is_file()
    assert {"3", "6"} <= {path.name for path in (workdir / "checkpoints").iterdir()}
    assert list(workdir.glob("events.*"))
    assert not (workdir / "profile").exists()  # it was not asked for
    assert len((workdir / "translations/3.txt").read_text().splitlines()) == 4
    assert len((workdir / "translations/6.test.txt").read_text().splitlines()) == 7
    lines = read_json_lines(workdir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 3, 4, 6, 6, 6]
    assert {"train/loss", "train/perplexity", "train/learning_rate", "train/grad_norm"} <= lines[0].keys()
    assert {"valid/loss", "valid/perplexity", "valid/bleu", "valid/exact_match"} <= lines[1].keys()
    loss, perplexity = lines[0]["train/loss"], lines[0]["train/perplexity"]
    assert f"step       2/6  loss {loss:.3f}  ppl {perplexity:.2f}  lr " in printed
    valid, test = (evaluations[split].scalars for split in ("valid", "test"))
    assert f"step       6 test: {'  '.join(f'{name} {value:.4g}' for name, value in test.items())}\n" in printed
    for name in valid:
        assert re.search(rf"│ {name} +│ {valid[name]:.4f} +│ {test[name]:.4f} +│", printed)
    shown = evaluations["test"]
    for source, target in [*zip(shown.sources, shown.references, strict=True)][::3]:
        assert re.search(rf"      {source}\n    > .*\n    = {target}\n", printed)


def test_evaluations_of_means_say_of_no_checkpoint_that_it_is_the_best(run, tmp_path):
    run("run", **DONE | {"eval__every": 2, "eval__average": 2, "checkpoint__keep": 2})
    assert saved_steps(tmp_path / "run/checkpoints") == [4, 6]  # not 2, though only it was evaluated alone
    lines = read_json_lines(tmp_path / "run/metrics.jsonl")
    assert [(line["step"], line["valid/averaged"]) for line in lines if "valid/averaged" in line] == [
        (2, 1),
        (4, 2),
        (6, 1),
    ]


def test_a_finished_run_is_evaluated_again_and_not_trained(run, done, tmp_path, capsys):
    assert len(done["valid"].outputs) == PAIRS["valid"]  # at the end, all of them
    before = final_state(tmp_path / "run", 6)
    (tmp_path / "run/tokenizer.json").unlink()  # as after a kill just behind config.json; it is made again
    capsys.readouterr()
    config = RunDirectory(tmp_path / "run").load_config()
    again = run("run", **DONE)
    told = "metrics.jsonl and translations/ keep the earlier evaluation of this step:"
    assert capsys.readouterr().out.count(told) == 1
    assert again["valid"].scalars == done["valid"].scalars
    run("run", **DONE | {"checkpoint__every": 3, "decode__beam_size": 1, "eval__final_sentences": 2})
    assert RunDirectory(tmp_path / "run").load_config() == config  # with which the evaluation that is kept was made
    assert saved_steps(tmp_path / "run/checkpoints") == [2, 4, 6]  # nothing is deleted
    with pytest.raises(UserError, match=r"decode\.beam_size: \d there, 1 now\nto evaluate another split in the same"):
        run("run", **DONE | {"eval__test": True, "decode__beam_size": 1})
    run("run", **DONE | {"eval__test": True, "checkpoint__keep": 5, "eval__sentences": 1})
    assert "test/final" in read_json_lines(tmp_path / "run/metrics.jsonl")[-1]
    assert RunDirectory(tmp_path / "run").load_config().eval.test
    jax.tree.map(np.testing.assert_array_equal, before, final_state(tmp_path / "run", 6))
    with pytest.raises(UserError, match=r"at step 6 already, past config\.steps=4"):
        run("run", steps=4, **DONE)


def test_the_time_of_a_run_goes_on_from_a_checkpoint_after_which_nothing_was_logged(run, done, tmp_path, capsys):
    file = tmp_path / "run/metrics.jsonl"
    seconds = [line["seconds"] for line in read_json_lines(file) if "train/loss" in line][-1]
    file.unlink()
    capsys.readouterr()
    run("run", **DONE | {"steps": 7})
    assert read_json_lines(file)[0]["seconds"] > seconds
    assert "metrics.jsonl lacks the 6 steps so far\n" in capsys.readouterr().out


def test_averages_are_of_the_last_regular_checkpoints_and_name_those_that_are_missing(run, done, tmp_path, capsys):
    run("run", **DONE, eval__final_average=2)
    said = capsys.readouterr().out
    assert "the mean of the parameters at steps 4, 6" in said
    assert "WARNING" not in said
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    run("run", **DONE, eval__final_average=2)
    said = capsys.readouterr().out
    assert "WARNING: " in said
    assert "run has no checkpoint of step 4, so the average is of 1 in place of 2" in said
    assert "evaluating the parameters of step 6" in said


def test_each_step_is_read_timed_logged_saved_and_evaluated_once_and_when_it_is_due(monkeypatch):
    clock, saved_after = [0], []

    def takes(seconds, result=lambda *_: None):
        def work(*given, **_):
            clock[0] += seconds
            return result(*given)

        return mock.Mock(side_effect=work)

    def train(state, step):
        trainer.programs.compilations += step == 1
        return step, -step  # the state after a step, and its metrics

    config = small_config(steps=7, log__every=2, checkpoint__every=3, eval__every=5, eval__patience=1)
    trainer = mock.MagicMock(start=0, batch=lambda step: step, log=takes(10), evaluate=takes(1_000))
    trainer.save = takes(100, lambda step: saved_after.append(trainer.read.call_args.args[1]))
    trainer.train_step, trainer.programs.compilations = takes(1, train), 0
    trainer.run.config, trainer.interruption.asked, trainer.out_of_patience.return_value = config, False, False
    monkeypatch.setattr("transformer_flax.training.loop.time", mock.Mock(perf_counter=lambda: clock[0]))
    fit(trainer, 0)
    assert [call.args for call in trainer.read.call_args_list] == [(-step, step) for step in range(1, 8)]
    assert [call.args for call in trainer.add_time.call_args_list] == [(step, 1) for step in range(2, 8)]
    assert [call.args for call in trainer.log.call_args_list] == [(-step, step) for step in (2, 4, 5, 6, 7)]
    assert trainer.save.mock_calls == [mock.call(step, must=step == 7) for step in (3, 5, 6, 7)]
    assert saved_after == [3, 5, 6, 7]  # the step that was read last
    assert trainer.evaluate.mock_calls == [mock.call(5, 5), mock.call(7, 7, last=True)]
    assert trainer.require_saved.mock_calls == [mock.call(7, 7)]
    assert len(trainer.check_saving.mock_calls) == 7

    trainer.interruption.asked, trainer.interruption.end.side_effect = True, Interrupted("stopped", 15)
    trainer.start = 6
    fit(trainer, 6)  # after the last step, nothing is left but to evaluate
    assert trainer.evaluate.mock_calls[-1] == mock.call(7, 7, last=True)
    trainer.start = 3
    with pytest.raises(Interrupted):
        fit(trainer, 3)
    assert trainer.save.mock_calls[-1] == mock.call(4, must=True)
    assert trainer.require_saved.mock_calls[-1] == mock.call(4, 4)


def test_the_bar_and_the_log_show_the_same_time_left(run, monkeypatch, capsys):
    shown = {}

    @contextlib.contextmanager
    def bar(self, description, start=0, **_):
        yield lambda done, of, left=None: shown.setdefault(description, {}).update({done: left})

    monkeypatch.setattr(Progress, "bar", bar)
    run("run", eval__every=0, log__every=2, checkpoint__every=100, steps=12)
    logged = re.findall(r"step +(\d+)/12 .*  (\S+) left", capsys.readouterr().out)
    assert len(logged) >= 5
    assert logged == [(step, duration(shown["training"][int(step)])) for step, _ in logged]
    assert shown["training"][11] == pytest.approx(shown["training"][10] / 2)  # it goes on between logs


def test_the_time_left_counts_the_evaluations_and_checkpoints_to_come(run, tmp_path, monkeypatch, capsys):
    shown, took, waited = {}, [], []

    @contextlib.contextmanager
    def bar(self, description, start=0, **_):
        yield lambda done, of, left=None: shown.setdefault(description, {}).update({done: left})

    def timed(method, seconds, sleep=0.5):
        def slow(*args, **kwargs):
            started = time.perf_counter()
            time.sleep(sleep)  # much longer than what is not timed here
            try:
                return method(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - started)

        return slow

    monkeypatch.setattr(Progress, "bar", bar)
    monkeypatch.setattr(Evaluator, "__call__", timed(Evaluator.__call__, took))
    monkeypatch.setattr(Checkpoints, "save", timed(Checkpoints.save, []))
    monkeypatch.setattr(Trainer, "save", timed(Trainer.save, waited, sleep=0))
    run("run", eval__every=4, eval__sentences=4, log__every=2, checkpoint__every=4, steps=12)
    rates = {
        line["step"]: line["train/steps_per_second"]
        for line in read_json_lines(tmp_path / "run/metrics.jsonl")
        if "train/steps_per_second" in line
    }
    # One evaluation and one checkpoint after step 8 and after the last, each as long as the one before.
    assert shown["training"][5] == pytest.approx(7 / rates[4] + 2 * (took[0] + waited[0]), abs=0.2)
    assert shown["training"][11] == pytest.approx(1 / rates[10] + took[1] + waited[1], abs=0.2)


def test_a_moving_average_is_kept_and_is_what_evaluations_use(run, tmp_path, capsys):
    run("run", ema_decay=0.9, eval__final_average=2, checkpoint__every=1, checkpoint__keep=6)
    told = capsys.readouterr().out
    assert "evaluating the moving average at step 3" in told
    assert "evaluating the moving average at step 6" in told
    assert "mean of the parameters" not in told

    restored = transformer_flax.restore(tmp_path / "run")  # by default what it was evaluated with
    assert restored.params_from == "the moving average at step 6"
    jax.tree.map(np.testing.assert_array_equal, restored.params, final_state(tmp_path / "run", 6).ema)
    each = [transformer_flax.restore(tmp_path / "run", average=1, steps=[step]).params for step in range(1, 7)]
    weights = 0.9 ** np.arange(5, -1, -1)
    explicit = jax.tree.map(lambda *leaves: np.average(np.float64(leaves), axis=0, weights=weights), *each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), restored.params, explicit)

    measured = read_json_lines(tmp_path / "run/metrics.jsonl")[-1]["valid/perplexity"]
    scores = np.concatenate(restored.score(*restored.split("valid")))
    assert np.exp(-scores.mean()) == pytest.approx(measured, rel=1e-3)
    plain = transformer_flax.restore(tmp_path / "run", average=1)
    assert np.exp(-np.concatenate(plain.score(*plain.split("valid"))).mean()) != pytest.approx(measured, rel=1e-3)


def test_updates_that_are_not_finite_are_left_out_and_end_the_run_after_so_many_in_a_row(run, text, tmp_path, capsys):
    huge = {"optimizer__factor": 1e30, "checkpoint__every": 1, "log__every": 1, "eval__every": 0}
    with pytest.raises(
        UserError, match=r"3 updates in a row were not finite; at step 4 the loss is nan.*; the last good checkpoint is"
    ):
        run("run", **huge, max_skipped=3)
    assert "step       2: the loss is nan" in capsys.readouterr().out
    lines = read_json_lines(tmp_path / "run/skipped.jsonl")
    assert [line["step"] for line in lines] == [2, 3, 4]
    tokenizer, english = RunDirectory(tmp_path / "run").load_tokenizer(), (text / "train.en").read_text().splitlines()
    assert [tokenizer.decode(ids) for ids in lines[0]["source"]] == [english[i] for i in lines[0]["pairs"]]
    directory = RunDirectory(tmp_path / "run")
    batches = prepare_run(directory.load_config(), directory, Progress(quiet=True)).train
    assert [line["pairs"] for line in lines] == [batches.pairs(step - 1).tolist() for step in (2, 3, 4)]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(final_state(tmp_path / "run", 3)))
    metrics = read_json_lines(tmp_path / "run/metrics.jsonl")
    assert [line["train/skipped"] for line in metrics] == [0, 1, 2]
    assert "train/loss" not in metrics[1]
    assert metrics[0]["train/learning_rate"] < metrics[1]["train/learning_rate"] == metrics[2]["train/learning_rate"]

    # Resumed from step 3 without a log at each step, metrics are read while the next step is computed.
    seldom = {"checkpoint__every": 10, "log__every": 10}
    with pytest.raises(UserError, match=r"5 updates in a row were not finite; at step 6 the loss is nan"):
        run("run", **huge | seldom, max_skipped=5)
    assert [line["step"] for line in read_json_lines(tmp_path / "run/skipped.jsonl")] == [2, 3, 4, 5, 6]


def test_a_damaged_checkpoint_is_put_aside_and_the_run_goes_on_from_the_one_before(run, done, tmp_path, capsys):
    expected = final_state(tmp_path / "run", 6)
    lines = read_json_lines(tmp_path / "run/metrics.jsonl")
    checkpoints = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "4", "6"]
    cut_short(checkpoints / "6")
    capsys.readouterr()
    run("run", **DONE)
    said = capsys.readouterr().out
    assert "6 cannot be read: it is damaged" in said
    assert "put aside as 6.damaged.1" in said
    assert "resuming from step 4" in said
    jax.tree.map(np.testing.assert_array_equal, expected, final_state(tmp_path / "run", 6))
    assert timeless(read_json_lines(tmp_path / "run/metrics.jsonl")) == timeless(lines)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["2", "4", "6", "6.damaged.1"]


def test_a_checkpoint_copied_over_another_one_is_put_aside_too(run, done, tmp_path, capsys):
    expected = final_state(tmp_path / "run", 6)
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    shutil.copytree(tmp_path / "run/checkpoints/4", tmp_path / "run/checkpoints/6")
    capsys.readouterr()
    run("run", **DONE)
    said = capsys.readouterr().out
    assert "run/checkpoints/6 is another one: its state is of step 4, not 6; " in said
    assert "resuming from step 4" in said
    jax.tree.map(np.testing.assert_array_equal, expected, final_state(tmp_path / "run", 6))


def cut_short(folder):
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_damaged_checkpoint_that_an_average_takes_is_put_aside_and_those_that_are_left_are_averaged(
    run, done, tmp_path, capsys
):
    checkpoints = tmp_path / "run/checkpoints"
    cut_short(checkpoints / "4")
    capsys.readouterr()
    run("run", **DONE, eval__final_average=3)
    said = capsys.readouterr().out
    assert "checkpoints/4 cannot be read: it is damaged" in said
    assert "it is put aside as 4.damaged.1" in said
    assert "run has no checkpoint of step 4, so the average is of 2 in place of 3" in said
    assert "the mean of the parameters at steps 2, 6" in said
    assert saved_steps(checkpoints) == [2, 6]


@contextlib.contextmanager
def opened(workdir, step):
    """The trainer of a run, while it is trained."""
    config = workdir.load_config()
    checkpoints = Checkpoints(workdir.checkpoints, seed=config.seed, **config.checkpoint)
    with workdir.lock(), contextlib.closing(checkpoints):
        # Of the programs, these tests use nothing else.
        programs = mock.Mock(task=mock.Mock(outputs="translations", score="bleu"))
        run: Any = types.SimpleNamespace(config=config, directory=workdir)
        with Trainer(run, programs, checkpoints, Progress(), Interruption(), start=step) as trainer:
            yield trainer


def test_a_run_whose_checkpoints_are_gone_begins_anew_with_a_warning(done, tmp_path, capsys):
    with opened(RunDirectory(tmp_path / "run"), 0):
        pass
    said = capsys.readouterr().out
    assert "WARNING: the run begins anew; its metrics and outputs up to step 6 are deleted" in said
    assert not [*(tmp_path / "run/translations").iterdir()]


def test_a_run_whose_directory_is_gone_saves_nothing_more(done, tmp_path):
    state, workdir = final_state(tmp_path / "run", 6), RunDirectory(tmp_path / "run")
    with opened(workdir, 6) as trainer:
        workdir.path.rename(tmp_path / "moved")
        workdir.checkpoints.mkdir(parents=True)  # as Orbax does where it is writing at that moment
        with pytest.raises(UserError, match=r"/run has been moved or deleted, .*; put it back"):
            trainer.save(state.replace(step=jax.numpy.int32(7)), must=False)
        assert not list(workdir.checkpoints.iterdir())
        workdir.path.rename(tmp_path / "half")
        shutil.copytree(tmp_path / "moved", workdir.path)  # as of another run, begun where this one was
        trainer.checkpoints.save(state.replace(step=jax.numpy.int32(8)), {})
        with pytest.raises(UserError, match=r"/run has been moved or deleted"):
            trainer.save(state.replace(step=jax.numpy.int32(9)), must=False)
    assert saved_steps(workdir.checkpoints) == [2, 4, 6, 8]  # none is deleted


def test_where_an_average_can_read_no_checkpoint_nothing_is_put_aside(done, tmp_path):
    state, workdir = final_state(tmp_path / "run", 6), RunDirectory(tmp_path / "run")
    for step in (2, 4, 6):  # while the run is at step 6
        cut_short(workdir.checkpoints / str(step))
    with opened(workdir, 6) as trainer, pytest.raises(UserError, match="checkpoints/4 cannot be read"):
        trainer.checkpoints.average(state.params, 6, 2, trainer.say)
    assert saved_steps(workdir.checkpoints) == [2, 4, 6]


def test_where_no_checkpoint_can_be_read_nothing_is_changed(run, done, tmp_path, monkeypatch):
    before = sorted(path for path in (tmp_path / "run").rglob("*") if path.name != ".lock")

    def full(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as context:
        context.setattr(ocp, "load_checkpointables", full)
        with pytest.raises(UserError, match=r"6 cannot be read.*nothing was changed.*out of memory"):
            run("run", steps=8, **DONE)
    assert sorted(path for path in (tmp_path / "run").rglob("*") if path.name != ".lock") == before
    assert saved_steps(tmp_path / "run/checkpoints") == [2, 4, 6]


def test_a_finished_run_that_is_decoded_otherwise_keeps_what_its_metrics_speak_of(run, done, tmp_path):
    file = tmp_path / "run/translations/6.txt"
    before = file.read_text()
    shown = run("run", **DONE, decode__min_length=5, decode__beam_size=1)["valid"].outputs
    assert shown != before.splitlines()
    assert file.read_text() == before


def test_two_do_not_train_in_one_directory(run, done, tmp_path):
    refusal = pytest.raises(UserError, match=r"another process trains in .* already \(process \d+ on ")
    config = (tmp_path / "run/config.json").read_text()
    with RunDirectory(tmp_path / "run").lock(), refusal:
        run("run", steps=50, **DONE)
    assert (tmp_path / "run/config.json").read_text() == config
    assert run("run", **DONE)


def test_a_refused_run_leaves_its_directory_free_for_the_mended_one(run):
    with pytest.raises(UserError, match="tokens_per_batch is 64"):
        run("run", data__tokens_per_batch=64)
    assert run("run")["valid"].outputs


def test_a_run_without_a_better_validation_loss_ends_when_patience_does(run, tmp_path, capsys):
    settings = {"steps": 30, "optimizer__factor": 1e-30, "eval__patience": 2, "eval__test": True}
    ended = run("run", **settings)
    assert "no better validation loss in 2 evaluations: the run ends at step 9" in capsys.readouterr().out
    file = tmp_path / "run/metrics.jsonl"
    lines = read_json_lines(file)
    assert [line["step"] for line in lines if "valid/loss" in line] == [3, 6, 9, 9]
    assert saved_steps(tmp_path / "run/checkpoints")[-1] == 9
    standing = measure(lines, 30)
    assert standing.step == 9
    assert standing.scores.keys() == {"valid", "test"}
    assert standing.scores["valid"]["loss"] == pytest.approx(ended["valid"].scalars["loss"])

    # As if it had been killed before the final evaluation, and then again when all was done.
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if "/final" not in line))
    assert measure(read_json_lines(file), 30).scores == {}
    for _ in range(2):
        run("run", **settings)
        assert timeless(read_json_lines(file)) == timeless(lines)
        assert saved_steps(tmp_path / "run/checkpoints")[-1] == 9
    config = (tmp_path / "run/config.json").read_text()
    run("run", **settings | {"decode__beam_size": 1})
    assert (tmp_path / "run/config.json").read_text() == config  # with which the evaluation that is kept was made


def test_a_final_evaluation_is_not_compared_with_others_when_the_run_is_trained_on(run, tmp_path):
    settings = {"optimizer__factor": 1e-30, "eval__patience": 2, "checkpoint__every": 3, "checkpoint__keep": 2}
    run("run", steps=6, eval__final_average=2, **settings)
    run("run", steps=30, eval__final_average=2, **settings)
    lines = [line for line in read_json_lines(tmp_path / "run/metrics.jsonl") if "valid/loss" in line]
    assert [(line["step"], "valid/final" in line) for line in lines] == [
        (3, False),
        (6, True),
        (6, False),
        (9, False),
        (9, True),
    ]


def test_a_run_that_stopped_at_an_evaluation_and_ends_there_has_a_final_one_too(run, tmp_path):
    run("run", checkpoint__every=3)
    shutil.rmtree(tmp_path / "run/checkpoints/6")  # as if it had been stopped after step 3
    ended = run("run", checkpoint__every=3, steps=3)["valid"]
    lines = [line for line in read_json_lines(tmp_path / "run/metrics.jsonl") if "valid/loss" in line]
    assert [(line["step"], "valid/final" in line) for line in lines] == [(3, False), (3, True)]
    assert lines[-1]["valid/bleu"] == ended.scalars["bleu"]
    assert len((tmp_path / "run/translations/3.txt").read_text().splitlines()) == len(ended.outputs) == PAIRS["valid"]


def test_a_run_that_learns_keeps_its_patience(run, tmp_path):
    run("run", steps=12, eval__patience=1, checkpoint__every=100)
    assert read_json_lines(tmp_path / "run/metrics.jsonl")[-1]["step"] == 12
    assert {9, 12} <= {*saved_steps(tmp_path / "run/checkpoints")}  # what was evaluated


def test_the_source_gain_is_what_another_sentences_source_costs(finished):
    run = transformer_flax.restore(finished)
    sources, targets = run.split("valid")
    others = [sources[-1], *sources[:-1]]
    # log P of each target token, of which those behind the longest that is measured are left out
    own, others = (
        np.concatenate([scores[:40] for scores in run.score(given, targets)]).mean() for given in (sources, others)
    )
    line = next(line for line in read_json_lines(finished / "metrics.jsonl") if "valid/source_gain" in line)
    assert line["valid/source_gain"] == pytest.approx(own - others, abs=1e-3)
    assert line["valid/source_gain"] > 0.2


def test_the_source_gain_is_the_same_where_each_sentence_occurs_twice_in_a_row(text, tmp_path):
    twice = shutil.copytree(text, tmp_path / "text")
    for file in twice.glob("valid.*"):
        file.write_text("".join(2 * line for line in file.read_text().splitlines(keepends=True)))
    few = {"steps": 1, "eval__every": 0, "eval__final_sentences": 1}
    first, second = (
        train(small_config(data__path=str(folder), **few), tmp_path / f"run{number}")["valid"].scalars
        for number, folder in enumerate((text, twice))
    )
    assert second["source_gain"] == pytest.approx(first["source_gain"], rel=1e-2)


def test_the_other_sentences_of_the_source_gain_are_others_where_sources_repeat():
    for sources, shift in ((b"abcd", 1), (b"aabb", 2), (b"aaabbbccc", 3), (b"abca", 2), (b"aa", 1), (b"a", 0)):
        assert shift_of([*map(bytes, zip(sources, strict=True))]) == shift

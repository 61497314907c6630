"""Several seeds in one program: each is the run that it is alone."""

import re
import shutil
import subprocess
import time
from unittest import mock

import jax
import numpy as np
import pytest

import transformer_flax
from tests.disks import mounted
from tests.training.small import final_state, small_config, timeless, write_text
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.training import vectorized_seeds
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.loop import train
from transformer_flax.training.vectorized_seeds import SeedsTrainer, check_seeds, stack_trees, train_seeds

SETTINGS = {"log__every": 3, "data__tokens_per_batch": 4096, "parallel__num_devices": 2}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = write_text(tmp_path_factory.mktemp("text"))
    return lambda **overrides: small_config(
        data__path=str(folder), data__cache_dir=str(folder / "cache"), **SETTINGS | overrides
    )


@pytest.fixture(scope="module")
def together(config, tmp_path_factory):
    """The directory of two runs that were trained together; not to be changed."""
    folder = tmp_path_factory.mktemp("together")
    evaluations = train_seeds(config(), [3, 1], folder)
    assert [each.keys() for each in evaluations] == [{"valid"}] * 2
    return folder


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """The directories of the same runs, each trained alone, and what they evaluated; not to be changed."""
    folder = tmp_path_factory.mktemp("alone")
    return {seed: (folder / str(seed), train(config(seed=seed), folder / str(seed))["valid"]) for seed in (1, 3)}


def copy(folder, to, *, without=()):
    shutil.copytree(folder, to)
    for checkpoint in without:
        shutil.rmtree(to / checkpoint)
    return to


def assert_same(ours, theirs):
    for seed in (1, 3):
        states = [final_state(folder / f"seed{seed}", 6) for folder in (ours, theirs)]
        jax.tree.map(np.testing.assert_array_equal, *states)
        lines = [timeless(read_json_lines(folder / f"seed{seed}/metrics.jsonl")) for folder in (ours, theirs)]
        assert lines[0] == lines[1]


def test_each_is_within_float_tolerance_what_it_is_alone(together, alone):
    for seed, (folder, evaluation) in alone.items():
        states = [jax.device_get(final_state(path, 6)) for path in (folder, together / f"seed{seed}")]
        assert states[0].seed == states[1].seed == seed
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), *states)
        restored = transformer_flax.restore(together / f"seed{seed}")  # an ordinary run
        assert restored.config.seed == seed
        assert restored.translate(evaluation.sources, num_devices=2) == evaluation.outputs
        ours, theirs = (read_json_lines(path / "metrics.jsonl") for path in (together / f"seed{seed}", folder))
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        assert ours[-1]["valid/perplexity"] == pytest.approx(theirs[-1]["valid/perplexity"], rel=1e-4)
    between = [final_state(together / f"seed{seed}", 6).params for seed in (1, 3)]
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), *between))) > 0.1


def test_runs_that_differ_in_their_seed_share_a_vocabulary_and_learn_apart(alone):
    vocabularies = {(folder / "tokenizer.json").read_text() for folder, _ in alone.values()}
    losses = {read_json_lines(folder / "metrics.jsonl")[0]["train/loss"] for folder, _ in alone.values()}
    assert (len(vocabularies), len(losses)) == (1, 2)


@pytest.mark.long
def test_the_time_left_counts_the_checkpoints_of_all_seeds(config, tmp_path, monkeypatch, capsys):
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda *args: (time.sleep(0.5), save(*args)))
    train_seeds(config(log__every=1, eval__every=0, checkpoint__every=2), [3, 1], tmp_path)
    (left,) = re.findall(r"seed 3: step +3/6 .* 0:(\d\d) left", capsys.readouterr().out)
    assert int(left) >= 2  # after steps 4 and 6, for two seeds each


def test_they_go_on_together_to_the_same_end(config, together, tmp_path, capsys):
    again = copy(together, tmp_path / "again", without=["seed1/checkpoints/6", "seed3/checkpoints/6"])
    file = again / "seed1/metrics.jsonl"  # as if the end had come while seed 1 was evaluated after step 3
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not ('"step": 3' in line and "valid/loss" in line)))
    train_seeds(config(), [3, 1], again)
    said = capsys.readouterr().out
    assert "seed 3: resuming from step 3" in said
    assert "seed 1: evaluating the parameters of step 3" in said
    assert "seed 3: evaluating the parameters of step 3" not in said
    assert said.count("pairs; vocabulary") == 1  # the text is read once, not for each seed
    assert_same(again, together)
    assert read_json_lines(again / "seed1/metrics.jsonl")[0]["train/seeds_at_once"] == 2


def test_one_that_is_a_checkpoint_ahead_waits_for_the_others(config, together, tmp_path, capsys):
    ahead = copy(together, tmp_path / "ahead", without=["seed1/checkpoints/6"])
    train_seeds(config(), [3, 1], ahead)
    assert "seed 3: its checkpoint of step 6, which others lack, is put aside as 6.ahead.1" in capsys.readouterr().out
    assert_same(ahead, together)


@pytest.mark.parametrize("left", [[3, 6], [6]], ids=str)  # 6 alone, as checkpoint.keep=1 leaves a run that has ended
def test_runs_that_have_no_step_in_common_are_not_thrown_away(config, together, tmp_path, left):
    gone = [f"seed3/checkpoints/{step}" for step in {3, 6} - set(left)]
    folder = copy(together, tmp_path / "apart", without=["seed1/checkpoints/3", "seed1/checkpoints/6", *gone])
    found = ", ".join(map(str, left))
    with pytest.raises(UserError, match=rf"no checkpoint of the same step .*seed3: {found}; .*seed1: none"):
        train_seeds(config(), [3, 1], folder)
    final_state(folder / "seed3", 6)  # is there still


def test_a_run_that_has_ended_with_its_first_checkpoint_is_not_thrown_away(config, tmp_path):
    train(config(seed=3, steps=3), tmp_path / "seed3")
    with pytest.raises(UserError, match=r"no checkpoint of the same step .*seed3: 3; .*seed1: none"):
        train_seeds(config(steps=3), [3, 1], tmp_path)
    final_state(tmp_path / "seed3", 3)
    assert not (tmp_path / "seed1").exists()


@pytest.mark.parametrize(("evaluates", "saves", "first"), [(0, 4, 4), (2, 4, 2), (4, 2, 2), (0, 6, 5)])
def test_a_seed_may_be_ahead_by_the_first_checkpoint_unless_that_is_of_the_last_step(
    config, tmp_path, monkeypatch, evaluates, saves, first
):
    def refuse(steps, first):
        raise UserError(f"{[*steps.values()]} may be {first} ahead")

    monkeypatch.setattr(vectorized_seeds, "common_steps", refuse)
    with pytest.raises(UserError, match=rf"\[\[\], \[\]\] may be {first} ahead"):
        train_seeds(config(steps=6, eval__every=evaluates, checkpoint__every=saves), [3, 1], tmp_path)


def test_what_lies_on_the_host_is_stacked_there():
    batch = {"source": np.ones((2, 3), np.int32)}
    assert isinstance(stack_trees([batch, batch])["source"], np.ndarray)
    assert isinstance(stack_trees([jax.numpy.ones(2)] * 2), jax.Array)


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "seed1", "2m") as disk:
        yield disk


@pytest.mark.long
def test_no_checkpoint_is_deleted_before_all_seeds_have_its_successor(config, tmp_path, small_disk):
    settings = {"checkpoint__every": 6, "checkpoint__keep": 1, "eval__every": 2, "model__d_ff": 768}
    settings |= {"parallel__num_devices": 1, "data__tokens_per_batch": 512, "decode__max_extra_length": 1}
    settings |= {"eval__sentences": 1, "eval__final_sentences": 1, "decode__beam_size": 1}
    with pytest.raises(UserError, match=r"a checkpoint (needs|could not be written).*seed1"):
        train_seeds(config(**settings), [0, 1], tmp_path)  # seed 0 has written that of step 6 by then
    assert [saved_steps(tmp_path / f"seed{seed}/checkpoints") for seed in (0, 1)] == [[2, 4, 6], [2, 4]]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    train_seeds(config(**settings), [0, 1], tmp_path)
    assert [saved_steps(tmp_path / f"seed{seed}/checkpoints") for seed in (0, 1)] == [[4, 6]] * 2  # 4 was the best


def test_a_run_is_no_place_for_others(config, tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match="holds a run, and its seeds would lie inside it; choose another --workdir"):
        train_seeds(config(), [0, 1], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "seed0").mkdir()
    (tmp_path / "seed0/config.json").touch()
    with pytest.raises(UserError, match=r"seed0/config\.json cannot be read"):  # it would go on
        train_seeds(config(), [0, 1], tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"parallel__mode": "pmap"}, r"config\.parallel\.mode is 'pmap'; it must be 'jit' where seeds"),
        ({"parallel__shard_params": True}, r"shard_params is True; it must be False where seeds"),
        ({"model__attention_implementation": "cudnn"}, r"is 'cudnn'; it must be 'plain' where seeds"),
        ({"eval__patience": 1, "eval__every": 3}, r"config\.eval\.patience is 1; it must be 0 where seeds"),
        ({"on_write_failure": "go on"}, r"on_write_failure is 'go on'; it must be 'stop' where seeds"),
    ],
)
def test_what_cannot_be_together_is_refused(config, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        train_seeds(config(**overrides), [0, 1], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_several_processes_do_not_train_seeds_together(monkeypatch):
    check_seeds(small_config())
    monkeypatch.setattr("transformer_flax.training.vectorized_seeds.share", lambda: (1, 2))
    with pytest.raises(UserError, match="several seeds are trained together by one process, without --distributed"):
        check_seeds(small_config())


def test_a_checkpoint_is_deleted_only_once_all_runs_have_a_later_one():
    trainers = [mock.MagicMock(), mock.MagicMock()]
    for trainer, steps in zip(trainers, ([2, 4], [2]), strict=True):
        trainer.checkpoints.steps.return_value = steps
    SeedsTrainer(trainers).require_saved(None, 4)
    for trainer in trainers:
        trainer.prune.assert_called_once_with(2)

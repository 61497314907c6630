"""The right parameters are taken, averaged or not; they are read whole or refused."""

import functools
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from tests.disks import snapshot
from tests.training.small import small_config
from tests.training.states import state_at
from transformer_flax.errors import UserError
from transformer_flax.training.averaging import EMA, Choice, choose, mean, to_average
from transformer_flax.training.checkpoint_files import load_params, saved_steps
from transformer_flax.training.checkpoints import Checkpoints


@pytest.mark.parametrize(
    ("steps", "newest", "count", "taken", "missing"),
    [
        ([5, 10, 20, 25], 25, 1, [25], []),
        ([5, 10, 20, 25], 25, 2, [20, 25], []),
        ([5, 10, 20, 25], 25, 9, [10, 20, 25], []),
        ([10, 20, 30], 30, 2, [20, 30], []),
        ([10], 10, 3, [10], []),  # there is none before it to be missed
        ([10, 20, 30], 20, 2, [10, 20], []),  # an evaluation made up for, of a step that is not the newest
        ([10, 20], 30, 2, [20, 30], []),  # the newest need not be there yet
        ([5, 25], 25, 2, [25], [20]),
        ([10, 20, 90], 90, 3, [90], [70, 80]),  # 10 and 20 are of another time
        ([50, 70, 80, 90, 100], 100, 5, [70, 80, 90, 100], [60]),  # 50 was the best
        ([10, 30, 50], 50, 4, [30, 50], [20, 40]),
    ],
)
def test_an_average_takes_the_steps_at_the_interval_before_the_newest_and_none_from_further_away(
    steps, newest, count, taken, missing
):
    assert to_average(steps, newest, 10, count) == Choice(taken, missing=missing)


@pytest.mark.parametrize("settings", [{"ema_decay": 0.9}, {"optimizer__name": "schedule_free"}], ids=str)
def test_the_average_that_a_run_keeps_is_taken_where_nothing_else_is_asked_for(tmp_path, settings):
    for step in (5, 10):
        (tmp_path / f"run/checkpoints/{step}").mkdir(parents=True)
    assert choose(tmp_path / "run/checkpoints", small_config(**settings)) == Choice([10], EMA)


def test_steps_that_are_named_are_averaged_and_no_other_number_of_them(tmp_path):
    for step in (10, 20, 30):
        (tmp_path / f"run/checkpoints/{step}").mkdir(parents=True)
    chosen = functools.partial(choose, tmp_path / "run/checkpoints", small_config(ema_decay=0.9), steps=[10, 30])
    assert [chosen(average=average) for average in (None, EMA, 1)] == [
        Choice([10, 30], EMA),
        Choice([10, 30], EMA),
        Choice([10, 30]),
    ]
    with pytest.raises(UserError, match="average is 3 and the steps of checkpoints are named"):
        chosen(average=3)


def test_a_reader_is_warned_of_the_steps_that_an_average_lacks(tmp_path, caplog):
    config = small_config(checkpoint__every=100, eval__final_average=5)
    for step in (500, 700, 800, 900, 1000):
        (tmp_path / f"run/checkpoints/{step}").mkdir(parents=True)
    assert choose(tmp_path / "run/checkpoints", config).steps == [700, 800, 900, 1000]
    assert "run has no checkpoint of step 600, so the average is of 4 in place of 5" in caplog.text
    caplog.clear()
    assert choose(tmp_path / "run/checkpoints", config, average=4).steps == [700, 800, 900, 1000]
    assert not caplog.text


def test_a_reader_is_warned_of_a_mean_of_the_first_checkpoints(tmp_path, caplog):
    for step in (100, 200):
        (tmp_path / f"run/checkpoints/{step}").mkdir(parents=True)
    choose(tmp_path / "run/checkpoints", small_config(checkpoint__every=100), average=3)
    early = "run is at step 200, too early for a mean of 3 checkpoints: this is the mean of the parameters at steps 100"
    assert early in caplog.text


def test_the_mean_is_of_float32_and_the_same_to_the_bit_each_time():
    rng = np.random.default_rng(0)
    trees = [{"w": rng.normal(size=(50, 40)).astype(np.float32) * 10.0**i, "b": np.float32(i)} for i in range(5)]
    first, again = mean(trees), mean(iter(trees))
    exact = np.mean([tree["w"].astype(np.float64) for tree in trees], axis=0)
    assert first["w"].dtype == np.float32
    np.testing.assert_array_equal(first["w"], again["w"])
    np.testing.assert_allclose(first["w"], exact, rtol=1e-5)
    assert first["b"] == 2
    np.testing.assert_array_equal(mean(trees[:1])["w"], trees[0]["w"])


def test_it_is_said_which_parameters_they_are():
    assert str(Choice([1500])) == "the parameters of step 1,500"
    assert str(Choice([1500, 3000])) == "the mean of the parameters at steps 1,500, 3,000"
    assert str(Choice([3000], EMA)) == "the moving average at step 3,000"


def test_parameters_are_loaded_beside_a_run_that_is_writing(tmp_path):
    directory = tmp_path / "checkpoints"
    checkpoints = Checkpoints(directory, every=10, keep=2, seed=0)
    for step in (10, 20):
        checkpoints.save(state_at(step), {})
    checkpoints.close()
    half = directory / "30.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    (half / "state/data").write_bytes(b"half of it")
    assert saved_steps(directory) == [10, 20]
    before = snapshot(directory)
    np.testing.assert_array_equal(load_params(directory, 20, state_at(0).params, seed=0)["w"], 20)
    assert snapshot(directory) == before
    resumed = Checkpoints(directory, every=10, keep=2, seed=0)  # the run itself clears it away
    assert not half.exists()
    resumed.save(state_at(30), {})
    resumed.close()
    assert saved_steps(directory) == [10, 20, 30]


@pytest.fixture
def two_kinds(tmp_path):
    """Checkpoints at step 1 without a moving average and at step 2 with one, whose values are 1, 2 and 12."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1, keep=2, seed=0)
    # Their structures differ, which no run does.
    checkpoints.save(state_at(1), {})
    checkpoints.save(state_at(2).replace(ema={"w": jnp.full(8, 12, jnp.float32)}), {})
    checkpoints.close()
    return tmp_path / "checkpoints"


def test_the_moving_average_is_loaded_in_place_of_the_parameters(two_kinds):
    like = state_at(0).params
    np.testing.assert_array_equal(load_params(two_kinds, 2, like, seed=0)["w"], 2)
    np.testing.assert_array_equal(load_params(two_kinds, 2, like, seed=0, kind="ema")["w"], 12)


@pytest.mark.parametrize(
    ("like", "kind"),
    [
        ({"w": jnp.zeros(8)}, "ema"),  # which it has not
        ({"w": jnp.zeros(9)}, "params"),  # of another size
        ({"w": jnp.zeros(8), "b": jnp.zeros(8)}, "params"),  # with one more, which Orbax would leave out silently
        ({"b": jnp.zeros(8)}, "params"),
    ],
    ids=["no average", "another size", "one more", "another name"],
)
def test_a_checkpoint_without_what_is_asked_for_is_named_in_words_for_people(two_kinds, like, kind):
    with pytest.raises(UserError) as refusal:
        load_params(two_kinds, 1, like, seed=0, kind=kind)
    told = str(refusal.value)
    assert told.startswith(f"the checkpoint {two_kinds / '1'} ")
    assert len(told) < 500
    assert "<class" not in told


def test_a_checkpoint_that_stands_for_another_step_or_seed_is_no_checkpoint_of_the_run(two_kinds):
    like = state_at(0)
    shutil.copytree(two_kinds / "1", two_kinds / "7")
    checkpoints = Checkpoints(two_kinds, every=1, keep=2, seed=0)
    another = Checkpoints(two_kinds, every=1, keep=2, seed=5)
    for read, told in (
        (lambda: load_params(two_kinds, 7, like.params, seed=0), "its state is of step 1, not 7"),
        (lambda: checkpoints.restore(like, 7), "its state is of step 1, not 7"),
        (lambda: load_params(two_kinds, 1, like.params, seed=5), "its state is of seed 0, not 5"),
        (lambda: another.restore(like, 1), "its state is of seed 0, not 5"),
    ):
        with pytest.raises(UserError, match=rf"the checkpoint {two_kinds}/\d is another one: {told}; there are those"):
            read()
    checkpoints.close()
    another.close()


def interrupted(*args):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interruption:
        raise ValueError("no handler could read it") from interruption  # as Orbax puts it


def test_an_interruption_while_one_is_read_is_no_damage(two_kinds, monkeypatch):
    monkeypatch.setattr(ocp, "load_checkpointables", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_params(two_kinds, 1, state_at(0).params, seed=0)


def test_an_interruption_while_a_run_goes_on_from_one_is_no_damage_either(two_kinds, monkeypatch):
    checkpoints = Checkpoints(two_kinds, every=1, keep=2, seed=0)
    monkeypatch.setattr(ocp, "load_checkpointables", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.restore(state_at(0), 2)
    checkpoints.close()

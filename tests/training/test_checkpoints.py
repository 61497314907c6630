"""Checkpoints on real disks, full ones among them."""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp

from transformer_flax.errors import UserError
from transformer_flax.training.checkpoints import (
    Checkpoints,
    describe,
    load_params,
    mean,
    saved_steps,
    to_average,
)
from transformer_flax.training.step import TrainState

OPTIMIZER = optax.sgd(0.1)


def state_at(step: int, size: int = 8) -> TrainState:
    """A state whose parameters are its step."""
    state = TrainState.create(0, {"w": jnp.full(size, step, jnp.float32)}, OPTIMIZER)
    return state.replace(step=jnp.int32(step))


def test_the_latest_and_the_best_are_kept_by_separate_rules(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=10, keep=2)
    for step, bleu in ((10, 1.0), (13, 30.0), (20, None), (25, 20.0), (30, None), (40, None), (47, 5.0)):
        checkpoints.save(state_at(step), bleu)
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", every=10, keep=2)
    assert again.steps() == [13, 30, 40, 47]  # the best, two at the interval, the newest
    assert float(again.restore(state_at(0), 13).params["w"][0]) == 13
    again.close()


def test_what_is_saved_is_not_what_the_next_step_makes_of_it(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1, keep=1)
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = state_at(1, size=1 << 20)
    checkpoints.save(state)
    for _ in range(5):
        state = advance(state)
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", every=1, keep=1)
    restored = again.restore(state_at(0, size=1 << 20), 1)
    again.close()
    np.testing.assert_array_equal(restored.params["w"], 1)


def test_averages_are_the_mean_of_the_last_regular_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=2, keep=3)
    for step in (2, 4, 5, 6):
        checkpoints.save(state_at(step))
    newest = state_at(8).params  # not saved yet
    average, steps = checkpoints.average(newest, 8, 3)
    assert steps == [4, 6, 8]  # 5 is not at the interval
    np.testing.assert_array_equal(average["w"], np.full(8, 6, np.float32))
    assert checkpoints.average(newest, 8, 100)[1] == [2, 4, 6, 8]
    assert checkpoints.average(newest, 8, 1)[1] == [8]
    between = state_at(9).params
    average, steps = checkpoints.average(between, 9, 2)
    assert steps == [4, 6]  # 9 is not at the interval either
    np.testing.assert_array_equal(average["w"], 5)
    alone, steps = checkpoints.average(between, 9, 1)
    assert steps == [9]
    np.testing.assert_array_equal(alone["w"], 9)
    checkpoints.close()


@pytest.mark.parametrize(
    ("steps", "count", "taken"),
    [
        ([5, 10, 20, 25], 1, [25]),
        ([5, 10, 20, 25], 2, [10, 20]),
        ([5, 10, 20, 25], 9, [10, 20]),
        ([5, 25], 2, [25]),  # none is regular
        ([10], 3, [10]),
    ],
)
def test_what_an_average_takes(steps, count, taken):
    assert to_average(steps, 10, count) == taken


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
    assert describe([1500]) == "the parameters of step 1,500"
    assert describe([1500, 3000]) == "the mean of the parameters at steps 1,500, 3,000"
    assert describe([3000], ema=True) == "the moving average at step 3,000"


def test_parameters_are_loaded_beside_a_run_that_is_writing(tmp_path):
    directory = tmp_path / "checkpoints"
    checkpoints = Checkpoints(directory, every=10, keep=2)
    for step in (10, 20):
        checkpoints.save(state_at(step))
    checkpoints.close()
    half = directory / "30.orbax-checkpoint-tmp"
    (half / "state").mkdir(parents=True)
    (half / "state/data").write_bytes(b"half of it")
    assert saved_steps(directory) == [10, 20]
    before = snapshot(directory)
    np.testing.assert_array_equal(load_params(directory, 20, state_at(0).params)["w"], 20)
    assert snapshot(directory) == before
    resumed = Checkpoints(directory, every=10, keep=2)  # the run itself clears it away
    resumed.save(state_at(30))
    resumed.close()
    assert not half.exists()


def snapshot(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture
def two_kinds(tmp_path):
    """Checkpoints at step 1 without a moving average and at step 2 with one, whose values are 1, 2 and 12."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", every=1, keep=2)
    # Their structures differ, which no run does.
    checkpoints.save(state_at(1))
    checkpoints.save(state_at(2).replace(ema={"w": jnp.full(8, 12, jnp.float32)}))
    checkpoints.close()
    return tmp_path / "checkpoints"


def test_the_moving_average_is_loaded_in_place_of_the_parameters(two_kinds):
    like = state_at(0).params
    np.testing.assert_array_equal(load_params(two_kinds, 2, like)["w"], 2)
    np.testing.assert_array_equal(load_params(two_kinds, 2, like, kind="ema")["w"], 12)


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
        load_params(two_kinds, 1, like, kind=kind)
    told = str(refusal.value)
    assert told.startswith(f"the checkpoint {two_kinds / '1'} ")
    assert len(told) < 500
    assert "<class" not in told


def test_an_interruption_while_one_is_read_is_no_damage(two_kinds, monkeypatch):
    def interrupted(*args):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interruption:
            raise ValueError("no handler could read it") from interruption  # as Orbax puts it

    monkeypatch.setattr(ocp, "load_checkpointables", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_params(two_kinds, 1, state_at(0).params)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_told_of_and_the_older_checkpoints_stay(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints", every=1, keep=5)
    checkpoints.save(state_at(1))
    with pytest.raises(UserError, match=r"a checkpoint needs 2\.1 MB and the disk of .* has [01]\.\d MB left"):
        checkpoints.save(state_at(2, size=1 << 19))
    checkpoints.close()
    again = Checkpoints(small_disk / "checkpoints", every=1, keep=5)
    assert again.steps() == [1]
    again.close()


def test_a_disk_that_fills_while_a_checkpoint_is_written_is_told_of_too(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints", every=1, keep=5)
    checkpoints.save(state_at(1))
    checkpoints.average(state_at(1).params, 1, 1)  # waits for it to be whole
    noise = np.random.default_rng(0).normal(size=200_000).astype(np.float32)  # 0.8 MB that do not compress
    big = TrainState.create(0, {"w": jnp.array(noise)}, OPTIMIZER).replace(step=jnp.int32(2))
    checkpoints.require_room = lambda state: None  # as if another program took the room in between
    (small_disk / "other").write_bytes(bytes(400_000))
    checkpoints.save(big)  # in the background
    with pytest.raises(UserError, match=r"could not be written to .*untouched"):
        checkpoints.close()
    again = Checkpoints(small_disk / "checkpoints", every=1, keep=5)
    assert again.steps() == [1]
    again.close()

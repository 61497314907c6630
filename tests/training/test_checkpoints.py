"""Checkpoints on real disks, full ones among them."""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_flax.errors import UserError
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.step import TrainState

OPTIMIZER = optax.sgd(0.1)


def state_at(step: int, size: int = 8) -> TrainState:
    """A state whose parameters are its step."""
    state = TrainState.create(0, {"w": jnp.full(size, step, jnp.float32)}, OPTIMIZER)
    return state.replace(step=jnp.int32(step))


def test_the_latest_and_the_best_are_kept_by_separate_rules(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step, bleu in ((1, 10.0), (2, 30.0), (3, None), (4, 20.0), (5, None)):
        checkpoints.save(state_at(step), bleu)
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert again.steps() == [2, 4, 5]
    assert float(again.restore(state_at(0), 2).params["w"][0]) == 2
    again.close()


def test_what_is_saved_is_not_what_the_next_step_makes_of_it(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    state = state_at(1, size=1 << 20)
    checkpoints.save(state, None)
    for _ in range(5):
        state = advance(state)
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", keep=1)
    restored = again.restore(state_at(0, size=1 << 20), 1)
    again.close()
    np.testing.assert_array_equal(restored.params["w"], 1)


def test_averages_are_the_mean_of_the_parameters(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (1, 2, 6):
        checkpoints.save(state_at(step), None)
    mean = checkpoints.average(state_at(0), [1, 2], state_at(6).params)
    checkpoints.close()
    np.testing.assert_array_equal(mean["w"], np.full(8, 3, np.float32))


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
    checkpoints = Checkpoints(small_disk / "checkpoints", keep=5)
    checkpoints.save(state_at(1), None)
    with pytest.raises(UserError, match=r"a checkpoint needs 2\.1 MB and the disk of .* has 0\.\d MB left"):
        checkpoints.save(state_at(2, size=1 << 19), None)
    checkpoints.close()
    again = Checkpoints(small_disk / "checkpoints", keep=5)
    assert again.steps() == [1]
    again.close()


def test_a_disk_that_fills_while_a_checkpoint_is_written_is_told_of_too(small_disk):
    checkpoints = Checkpoints(small_disk / "checkpoints", keep=5)
    checkpoints.save(state_at(1), None)
    checkpoints.average(state_at(0), [], state_at(1).params)  # waits for it to be whole
    noise = np.random.default_rng(0).normal(size=200_000).astype(np.float32)  # 0.8 MB that do not compress
    big = TrainState.create(0, {"w": jnp.array(noise)}, OPTIMIZER).replace(step=jnp.int32(2))
    checkpoints.require_room = lambda state: None  # as if another program took the room in between
    (small_disk / "other").write_bytes(bytes(400_000))
    checkpoints.save(big, None)  # in the background
    with pytest.raises(UserError, match=r"could not be written to .*untouched"):
        checkpoints.close()
    again = Checkpoints(small_disk / "checkpoints", keep=5)
    assert again.steps() == [1]
    again.close()

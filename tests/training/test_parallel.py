"""Law 2: sums before ratios. Under plain SGD with rate 1 the update is the gradient, which Adam would hide."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from tests.conftest import TINY
from transformer_flax.errors import UserError
from transformer_flax.model.transformer import Transformer, init_params
from transformer_flax.training.loss import translation_loss
from transformer_flax.training.parallel import make_parallel
from transformer_flax.training.step import TrainState, make_eval_step, make_train_step

ROWS = 32
ONE_LAYER = dataclasses.replace(TINY, num_layers=1, dropout=0.0)  # there are many programs to compile


@pytest.fixture(scope="module")
def batch():
    """Rows of very different length, some empty, so that means of means would differ from the mean."""
    rng = np.random.default_rng(0)
    batch = {}
    for side in ("source", "target"):
        rows = rng.integers(3, TINY.vocab_size, (ROWS, 7)).astype(np.int32)
        lengths = rng.integers(0, 8, ROWS)
        lengths[:4] = 0
        batch[side] = np.where(np.arange(7) < lengths[:, None], rows, 0)
    return batch


@functools.cache
def initial_params():
    return init_params(ONE_LAYER, jax.random.key(1))


def update(batch, *, mode="jit", num_devices=1, accumulation_steps=1, dropout=0.0):
    """(gradient, metrics) of one step."""
    config = dataclasses.replace(ONE_LAYER, dropout=dropout)
    parallel = make_parallel(ConfigDict({"mode": mode, "num_devices": num_devices}), ROWS, accumulation_steps)
    assert parallel.num_devices == num_devices
    loss_fn = translation_loss(Transformer(config), 0.1)
    optimizer = optax.sgd(1.0)
    step = parallel.compile(
        make_train_step(loss_fn, optimizer, accumulation_steps=accumulation_steps, axis_name=parallel.axis_name)
    )
    state = TrainState.create(7, initial_params(), optimizer)
    after, metrics = jax.block_until_ready(step(parallel.replicate(state), parallel.shard(batch)))
    after, metrics = jax.device_get(parallel.unreplicate((after, metrics)))
    assert after.step == 1
    return jax.tree.map(np.subtract, jax.device_get(state.params), after.params), metrics


def assert_close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), ours, theirs)


@pytest.fixture(scope="module")
def plain(batch):
    """The gradient of the mean over all target tokens, from nothing but jax.grad."""
    loss_fn = translation_loss(Transformer(ONE_LAYER), 0.1)

    def mean(params):
        sums, counts = loss_fn(params, batch, None)
        return sums["loss"] / counts["loss"]

    return jax.device_get(jax.jit(jax.grad(mean))(initial_params()))


@pytest.mark.parametrize("mode", ["jit", "pmap"])
@pytest.mark.parametrize(
    ("num_devices", "accumulation_steps"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (8, 1), (8, 2), (8, 4)]
)
def test_devices_and_micro_batches_do_not_change_the_gradient(plain, batch, mode, num_devices, accumulation_steps):
    gradient, metrics = update(batch, mode=mode, num_devices=num_devices, accumulation_steps=accumulation_steps)
    assert_close(gradient, plain)
    assert metrics.counts["loss"] == (batch["target"] != 0).sum()
    assert float(metrics.grad_norm) == pytest.approx(float(optax.tree.norm(plain)), rel=1e-4)


def test_with_dropout_jit_does_not_depend_on_the_number_of_devices(plain, batch):
    alone, _ = update(batch, dropout=0.3)
    for num_devices in (2, 8):
        together, _ = update(batch, dropout=0.3, num_devices=num_devices)
        assert_close(together, alone)
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), alone, plain)
    assert max(jax.tree.leaves(difference)) > 1e-3  # there was dropout


@pytest.mark.parametrize("parts", [{"mode": "pmap", "num_devices": 2}, {"accumulation_steps": 2}], ids=str)
def test_with_dropout_devices_of_pmap_and_micro_batches_draw_anew(batch, parts):
    # Two parts with the same rows: had they the same masks, their mean would be the gradient of either one alone.
    half = {side: rows[ROWS // 2 :] for side, rows in batch.items()}
    if "mode" in parts:
        twice = {side: np.concatenate([rows, rows]) for side, rows in half.items()}
        alone, _ = update(half, mode="pmap", dropout=0.3)
    else:
        twice = {side: np.repeat(rows, 2, axis=0) for side, rows in half.items()}
        alone, _ = update(half, dropout=0.3)
    both, _ = update(twice, dropout=0.3, **parts)
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), alone, both)
    assert max(jax.tree.leaves(difference)) > 1e-3


@pytest.mark.parametrize("mode", ["jit", "pmap"])
def test_evaluation_sums_over_devices(batch, mode):
    parallel = make_parallel(ConfigDict({"mode": mode, "num_devices": 8}), ROWS, 1)
    loss_fn = translation_loss(Transformer(ONE_LAYER), 0.1)
    params = initial_params()
    step = parallel.compile(make_eval_step(loss_fn, axis_name=parallel.axis_name))
    result = parallel.unreplicate(step(parallel.replicate(params), parallel.shard(batch)))
    assert_close(jax.device_get(result), jax.device_get(loss_fn(params, batch, None)))


def test_steps_differ_in_their_dropout_and_seeds_too(batch):
    config = dataclasses.replace(ONE_LAYER, dropout=0.3)
    step = jax.jit(make_train_step(translation_loss(Transformer(config), 0.1), optax.sgd(0.0)))
    params = initial_params()
    state = TrainState.create(0, params, optax.sgd(0.0))
    after, first = step(state, batch)
    _, second = step(after, batch)
    _, again = step(state, batch)
    _, other = step(TrainState.create(1, params, optax.sgd(0.0)), batch)
    losses = [float(metrics.sums["loss"]) for metrics in (first, second, again, other)]
    assert losses[0] == losses[2]
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    ("parallel", "rows", "accumulation_steps", "message"),
    [
        ({"mode": "mpi", "num_devices": 1}, 8, 1, "mode is 'mpi'"),
        ({"mode": "jit", "num_devices": 9}, 8, 1, "num_devices is 9; this machine has 8"),
        ({"mode": "jit", "num_devices": -1}, 8, 1, "num_devices is -1"),
        ({"mode": "jit", "num_devices": 3}, 8, 1, "rows_multiple_of is 8, which does not divide among 3 devices"),
        ({"mode": "pmap", "num_devices": 8}, 8, 2, "set it to a multiple of 16"),
    ],
)
def test_what_does_not_divide_is_refused(parallel, rows, accumulation_steps, message):
    with pytest.raises(UserError, match=message):
        make_parallel(ConfigDict(parallel), rows, accumulation_steps)

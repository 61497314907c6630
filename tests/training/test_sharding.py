"""Law 2: sums before ratios. Under plain SGD with rate 1 the update is the gradient, which Adam would hide."""

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from configs import numbers
from tests.conftest import TINY, long
from tests.model.parameters import random_params
from tests.training.states import OPTIMIZER
from transformer_flax.errors import UserError
from transformer_flax.model.registry import init_params
from transformer_flax.model.transformer import Transformer
from transformer_flax.training.checkpoint_files import seal
from transformer_flax.training.loss import split_rows, translation_loss
from transformer_flax.training.optimizer import exponential, make_optimizer, schedule_free
from transformer_flax.training.sharding import SMALL, make_parallel
from transformer_flax.training.step import TrainState, make_eval_step, make_train_step

ROWS = 32
ONE_LAYER = dataclasses.replace(TINY, num_layers=1, dropout=0.0)  # there are many programs to compile


def make_batch():
    rng = np.random.default_rng(0)
    batch = {}
    for side in ("source", "target"):
        rows = rng.integers(3, TINY.vocab_size, (ROWS, 7)).astype(np.int32)
        lengths = rng.integers(0, 8, ROWS)
        lengths[:4] = 0
        batch[side] = np.where(np.arange(7) < lengths[:, None], rows, 0)
    return batch


BATCH = make_batch()  # rows of very different length, some empty, so that means of means would differ from the mean


def on_devices(num_devices, *, mode="jit", shard_params=False, accumulation_steps=1, loss_chunks=1):
    config = ConfigDict({"mode": mode, "num_devices": num_devices, "shard_params": shard_params})
    return make_parallel(config, ROWS, accumulation_steps, loss_chunks)


def update(batch=BATCH, *, mode="jit", num_devices=1, accumulation_steps=1, loss_chunks=1, dropout=0.0, r_drop=0.0):
    """(gradient, metrics) of one step."""
    config = dataclasses.replace(ONE_LAYER, dropout=dropout)
    parallel = on_devices(num_devices, mode=mode, accumulation_steps=accumulation_steps, loss_chunks=loss_chunks)
    assert parallel.num_devices == num_devices
    loss_fn = translation_loss(Transformer(config), 0.1, loss_chunks, r_drop=r_drop)
    optimizer = optax.sgd(1.0)
    step = parallel.compile(
        make_train_step(loss_fn, optimizer, accumulation_steps=accumulation_steps, axis_name=parallel.axis_name)
    )
    state = TrainState.create(7, random_params(ONE_LAYER), optimizer)
    after, metrics = jax.block_until_ready(step(parallel.place(state), parallel.shard(batch)))
    after, metrics = jax.device_get((after, metrics))
    assert after.step == 1
    return jax.tree.map(np.subtract, jax.device_get(state.params), after.params), metrics


def assert_close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), ours, theirs)


@pytest.fixture(scope="module")
def plain():
    """The gradient of the mean over all target tokens, from nothing but jax.grad."""
    loss_fn = translation_loss(Transformer(ONE_LAYER), 0.1)

    def mean(params):
        sums, counts = loss_fn(params, BATCH, None)
        return sums["loss"] / counts["loss"]

    return jax.device_get(jax.jit(jax.grad(mean))(random_params(ONE_LAYER)))


@pytest.mark.parametrize(
    ("mode", "num_devices", "accumulation_steps"),
    [
        ("jit", 8, 4),
        ("pmap", 2, 4),
        *(long(*case) for case in (("jit", 1, 4), ("jit", 8, 1), ("pmap", 1, 1), ("pmap", 8, 1))),
    ],
)
def test_devices_and_micro_batches_do_not_change_the_gradient(plain, mode, num_devices, accumulation_steps):
    gradient, metrics = update(mode=mode, num_devices=num_devices, accumulation_steps=accumulation_steps)
    assert_close(gradient, plain)
    assert metrics.counts["loss"] == (BATCH["target"] != 0).sum()
    assert float(metrics.grad_norm) == pytest.approx(float(optax.tree.norm(plain)), rel=1e-4)


@pytest.mark.parametrize("mode", [long("jit"), long("pmap")])
def test_chunks_of_the_loss_do_not_change_the_gradient(plain, mode):
    gradient, metrics = update(mode=mode, num_devices=2, accumulation_steps=2, loss_chunks=4)
    assert_close(gradient, plain)
    assert metrics.counts["loss"] == (BATCH["target"] != 0).sum()


@pytest.mark.parametrize("mode", [long("jit"), "pmap"])
def test_r_drop_divides_once_by_the_tokens_of_all_parts(plain, mode):
    parts = {"num_devices": 2, "accumulation_steps": 2, "loss_chunks": 2, "mode": mode}
    gradient, metrics = update(r_drop=5.0, **parts)  # without dropout both passes agree
    assert_close(gradient, plain)
    assert metrics.counts["loss"] == metrics.counts["divergence"] == (BATCH["target"] != 0).sum()


@pytest.mark.parametrize("r_drop", [long(0.0), 5.0])
def test_with_dropout_jit_does_not_depend_on_the_number_of_devices(plain, r_drop):
    alone, together = (update(dropout=0.3, r_drop=r_drop, num_devices=num_devices)[0] for num_devices in (1, 8))
    assert_close(together, alone)
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), alone, plain)
    assert max(jax.tree.leaves(difference)) > 1e-3  # there was dropout


@pytest.mark.parametrize("parts", [{"mode": "pmap", "num_devices": 2}, {"accumulation_steps": 2}], ids=str)
def test_with_dropout_devices_of_pmap_and_micro_batches_draw_anew(parts):
    # Two parts with the same rows: had they the same masks, their mean would be the gradient of either one alone.
    half = {side: rows[ROWS // 2 :] for side, rows in BATCH.items()}
    if "mode" in parts:
        twice = {side: np.concatenate([rows, rows]) for side, rows in half.items()}
        alone, _ = update(half, mode="pmap", dropout=0.3)
    else:
        twice = {side: np.repeat(rows, 2, axis=0) for side, rows in half.items()}
        alone, _ = update(half, dropout=0.3)
    both, _ = update(twice, dropout=0.3, **parts)
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), alone, both)
    assert max(jax.tree.leaves(difference)) > 1e-3


def test_every_part_of_a_batch_has_rows_of_every_device_which_stay_there():
    rows = on_devices(8).shard(np.arange(ROWS))
    parts = jax.jit(split_rows, static_argnums=1)(rows, 4)
    for before, after in zip(rows.addressable_shards, parts.addressable_shards, strict=True):
        assert after.device == before.device
        assert after.data.tolist() == [[row] for row in before.data.tolist()]  # [part, row]


def test_evaluation_sums_over_devices():
    loss_fn, params = translation_loss(Transformer(ONE_LAYER), 0.1), random_params(ONE_LAYER)
    expected = jax.device_get(jax.jit(loss_fn)(params, BATCH, None))
    for mode in ("jit", "pmap"):
        parallel = on_devices(8, mode=mode)
        step = parallel.compile(make_eval_step(loss_fn, axis_name=parallel.axis_name))
        result = step(parallel.place(params), parallel.shard(BATCH))
        assert_close(jax.device_get(result), expected)


WIDE = dataclasses.replace(ONE_LAYER, d_model=64, d_ff=512, dropout=0.3)  # feed-forward layers worth sharding
STEPS = 4
EMA = exponential(0.9)


@functools.cache
def learn(num_devices, *, shard_params, accumulation_steps=1, optimizer="adam", average=EMA):
    """(parallel, state, (sums, counts) of an evaluation) after steps with dropout and a moving average."""
    parallel = on_devices(num_devices, shard_params=shard_params, accumulation_steps=accumulation_steps)
    loss_fn = parallel.gathering(translation_loss(Transformer(WIDE), 0.1))
    config = numbers.get_config()
    config.model.d_model, config.optimizer.name = WIDE.d_model, optimizer
    optimizer = make_optimizer(config)
    step = make_train_step(loss_fn, optimizer, accumulation_steps=accumulation_steps, average=average)
    step = parallel.compile(step, donate_state=True)
    state = TrainState.create(7, init_params(WIDE, jax.random.key(1)), optimizer, keep_ema=True)
    state, rows = parallel.place(state), parallel.shard(BATCH)
    for _ in range(STEPS):
        before = state
        state, _ = jax.block_until_ready(step(before, rows))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))  # its memory is used again
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, before)
    measured = jax.device_get(parallel.compile(make_eval_step(loss_fn))(state.ema, rows))
    return parallel, state, measured


@pytest.mark.long
def test_sharded_parameters_learn_the_same_and_are_sealed_the_same():
    _, alone, measured_alone = learn(1, shard_params=False)
    parallel, state, measured = learn(8, shard_params=True)
    assert_close(jax.device_get(state), jax.device_get(alone))
    assert_close(measured, measured_alone)

    whole = parallel.local(state)
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(whole))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole), jax.device_get(state))
    assert seal(vars(state), {}) == seal(vars(whole), {})


@pytest.mark.long
def test_sharded_parameters_learn_the_same_with_other_optimizers_and_averages():
    settings = {"optimizer": "muon", "average": schedule_free(2, 0.9)}  # that of schedule_free is Adam, as above
    _, alone, _ = learn(1, shard_params=False, **settings)
    _, state, _ = learn(2, shard_params=True, **settings)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *map(jax.device_get, (state, alone))
    )
    for tree in (state.params, state.opt_state, state.ema):
        for leaf in jax.tree.leaves(tree):
            assert leaf.sharding.is_fully_replicated == (leaf.size < SMALL)


@pytest.mark.long
def test_sharded_parameters_learn_the_same_from_micro_batches():
    states = [learn(2, shard_params=sharded, accumulation_steps=2)[1] for sharded in (False, True)]
    assert_close(*map(jax.device_get, states))


def test_of_sharded_parameters_each_device_holds_its_share():
    _, state, _ = learn(8, shard_params=True)
    for tree in (state.params, state.opt_state.mu, state.opt_state.nu, state.ema):
        for leaf in jax.tree.leaves(tree):
            shards = 8 if leaf.size >= SMALL else 1
            sizes = [shard.data.size for shard in leaf.addressable_shards]
            assert sizes == [leaf.size // shards] * 8
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state) if leaf.ndim == 0)

    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert held < whole / 4  # an eighth of the feed-forward layers, and the small ones


def test_arrays_are_sharded_along_the_largest_axis_that_the_devices_divide():
    parallel = on_devices(8, shard_params=True)
    shapes = [(64, 72), (100, 64), (64, 4, 16), (99, 99), (8, 8)]
    placed = parallel.place([np.zeros(shape, np.float32) for shape in shapes])
    shards = [leaf.addressable_shards[0].data.shape for leaf in placed]
    assert shards == [(64, 9), (100, 8), (8, 4, 16), (99, 99), (8, 8)]


def test_sharded_parameters_are_gathered_and_not_the_batch():
    few = {side: rows[-8:] for side, rows in BATCH.items()}  # a row a device, less than any array of parameters
    parallel = on_devices(8, shard_params=True)
    loss_fn = parallel.gathering(translation_loss(Transformer(WIDE), 0.1))
    state = parallel.place(TrainState.create(7, init_params(WIDE, jax.random.key(1)), OPTIMIZER))
    step = parallel.compile(make_train_step(loss_fn, OPTIMIZER))
    program = step.lower(state, parallel.shard(few)).compile().as_text()
    gathered = {tuple(map(int, shape.split(","))) for shape in re.findall(r"= f32\[([\d,]+)\]\S* all-gather", program)}
    assert gathered == {leaf.shape for leaf in jax.tree.leaves(state.params) if leaf.size >= SMALL}


def test_steps_differ_in_their_dropout_and_seeds_too():
    config = dataclasses.replace(ONE_LAYER, dropout=0.3)
    step = jax.jit(make_train_step(translation_loss(Transformer(config), 0.1), optax.sgd(0.0)))
    params = random_params(ONE_LAYER)
    state = TrainState.create(0, params, optax.sgd(0.0))
    after, first = step(state, BATCH)
    _, second = step(after, BATCH)
    _, again = step(state, BATCH)
    _, other = step(TrainState.create(1, params, optax.sgd(0.0)), BATCH)
    losses = [float(metrics.sums["loss"]) for metrics in (first, second, again, other)]
    assert losses[0] == losses[2]
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    ("parallel", "rows", "accumulation_steps", "message"),
    [
        ({"mode": "jit", "num_devices": 9}, 8, 1, "num_devices is 9; there are 8 .*; config.parallel.cpu_devices"),
        ({"mode": "jit", "num_devices": -1}, 8, 1, r"num_devices is -1; .* as several processes must$"),
        ({"mode": "jit", "num_devices": 3}, 8, 1, "rows_multiple_of is 8, which does not divide among 3 devices"),
        ({"mode": "pmap", "num_devices": 8}, 8, 2, "set it to a multiple of 16"),
    ],
)
def test_what_does_not_divide_is_refused(parallel, rows, accumulation_steps, message):
    with pytest.raises(UserError, match=message):
        make_parallel(ConfigDict({"shard_params": False} | parallel), rows, accumulation_steps)


def test_chunks_of_the_loss_must_divide_the_rows_too():
    with pytest.raises(UserError, match=r"2 accumulation steps x 3 chunks of the loss; set it to a multiple of 12"):
        on_devices(2, accumulation_steps=2, loss_chunks=3)

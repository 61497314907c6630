"""Updates that are left out, and where gradients are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import numbers
from transformer_flax.training.optimizer import (
    adam,
    exponential,
    make_average,
    make_optimizer,
    make_schedule,
    skip_if_not_finite,
)
from transformer_flax.training.step import TrainState, dropout_key, init_key, make_train_step


def test_an_optimizer_may_keep_the_parameters_that_it_begins_with():
    def init(params):
        return params

    def update(updates, state, params=None, **_):
        return updates, state

    state = TrainState.create(0, {"w": jnp.ones(3)}, optax.GradientTransformation(init, update), keep_ema=True)
    double = jax.jit(lambda state: jax.tree.map(lambda x: 2 * x, state), donate_argnums=0)
    assert double(state).opt_state["w"].tolist() == [2, 2, 2]


def test_a_step_averages_the_parameters_that_it_makes_and_leaves_them_alone():
    def loss_fn(params, batch, key):
        return {"loss": jnp.sum(batch) * params["w"]}, {"loss": jnp.float32(batch.size)}

    optimizer = optax.sgd(1.0)
    state = TrainState.create(0, {"w": jnp.float32(10)}, optimizer, keep_ema=True)
    plain = TrainState.create(0, {"w": jnp.float32(10)}, optimizer)
    step = jax.jit(make_train_step(loss_fn, optimizer, average=exponential(0.5)))
    plain_step = jax.jit(make_train_step(loss_fn, optimizer))
    for gradient in (1.0, 2.0, 4.0):
        state, _ = step(state, jnp.full(3, gradient))
        plain, _ = plain_step(plain, jnp.full(3, gradient))
    assert plain.ema is None
    assert float(state.params["w"]) == float(plain.params["w"]) == 3  # after 9 and 7
    assert float(state.ema["w"]) == pytest.approx((9 / 4 + 7 / 2 + 3) / (1 / 4 + 1 / 2 + 1))


def test_schedule_free_is_that_of_optax_and_keeps_the_average_that_is_evaluated():
    config = numbers.get_config()
    config.optimizer.update(name="schedule_free", warmup_steps=4, b1=0.8, factor=1.0)
    rate, average = make_schedule(config), make_average(config)
    theirs = optax.contrib.schedule_free(
        optax.adam(rate, b1=0.0, b2=config.optimizer.b2, eps=config.optimizer.eps),
        lambda count: rate(count - 1),
        b1=0.8,
    )
    target = jnp.array([1.0, -3.0, 0.5])

    def loss_fn(params, batch, key):
        return {"loss": jnp.sum((params["w"] - target) ** 2 * batch)}, {"loss": jnp.float32(1)}

    optimizer = make_optimizer(config)
    state = TrainState.create(0, {"w": jnp.zeros(3)}, optimizer, keep_ema=True)
    step = jax.jit(make_train_step(loss_fn, optimizer, average=average))
    y, their_state = state.params, theirs.init(state.params)
    for batch in np.random.default_rng(0).uniform(size=(12, 3)):
        state, _ = step(state, batch)
        grads = jax.grad(lambda params, batch=batch: loss_fn(params, batch, None)[0]["loss"])(y)
        updates, their_state = theirs.update(grads, their_state, y)
        y = optax.apply_updates(y, updates)
        x = optax.contrib.schedule_free_eval_params(their_state, y)
        np.testing.assert_allclose(state.ema["w"], x["w"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(state.params["w"], their_state.z["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("axis_name", [None, "data"], ids=["jit", "pmap"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38], ids=str)
def test_an_update_that_is_not_finite_is_as_if_it_had_not_been(axis_name, bad):
    """One of two devices has a bad value; the other must leave the update out too."""

    def loss_fn(params, batch, key):
        noise = jax.random.normal(key, ())
        return {"loss": jnp.sum(batch * params["w"] ** 2 + noise)}, {"loss": jnp.float32(batch.size)}

    optimizer = adam(lambda count: 0.1 / (1 + count), b1=0.9, b2=0.98, eps=1e-9)
    train_step = make_train_step(loss_fn, optimizer, average=exponential(0.5), axis_name=axis_name)
    step = jax.pmap(train_step, axis_name=axis_name) if axis_name else jax.jit(train_step)
    batches = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)

    def run(batches, start):
        state, seen = start, []
        for batch in batches:
            state, metrics = step(state, jnp.array(batch))
            seen.append((int(np.max(metrics.skipped)), int(np.max(metrics.skipped_in_a_row))))
        return jax.device_get(state), seen

    start = TrainState.create(3, {"w": jnp.full(3, 2.0)}, optimizer, keep_ema=True)
    if axis_name:
        start = jax.tree.map(lambda x: jnp.stack([x, x]), start)
    spoilt = batches.copy()
    spoilt[[1, 3, 4], 1, 0] = bad
    state, seen = run(spoilt, start)
    assert seen == [(0, 0), (1, 1), (1, 0), (2, 1), (3, 2), (3, 0)]

    # What is left is what the good batches alone would have made, with the keys of the steps that they were seen at.
    good, expected, params = [0, 2, 5], start, []
    for made, number in enumerate(good):
        at_step = jax.tree.map(lambda x, n=number: jnp.full_like(x, n), expected.step)
        expected, _ = run(batches[number : number + 1], expected.replace(step=at_step, skipped=at_step - made))
        expected = jax.tree.map(jnp.array, expected)
        params.append(np.array(expected.params["w"]))
    np.testing.assert_allclose(state.ema["w"], np.average(params, axis=0, weights=[0.25, 0.5, 1]), rtol=1e-6)
    for name in ("params", "opt_state", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), jax.device_get(getattr(expected, name)))
    assert int(np.max(state.step)) == 6
    assert np.isfinite(state.params["w"]).all()


def test_a_loss_that_is_not_finite_is_left_out_though_its_gradient_is_finite():
    def loss_fn(params, batch, key):
        return {"loss": params["w"] + jnp.sum(batch)}, {"loss": jnp.float32(batch.size)}

    optimizer = optax.sgd(1.0)
    step = jax.jit(make_train_step(loss_fn, optimizer))
    state, metrics = step(TrainState.create(0, {"w": jnp.float32(10)}, optimizer), jnp.array([jnp.inf]))
    assert (float(state.params["w"]), int(state.skipped), float(metrics.grad_norm)) == (10, 1, 1)


def test_a_gradient_that_is_not_finite_is_left_out_though_its_loss_is_finite():
    def loss_fn(params, batch, key):
        return {"loss": jnp.sqrt(params["w"] - 10) + jnp.sum(batch)}, {"loss": jnp.float32(batch.size)}

    optimizer = optax.sgd(1.0)
    step = jax.jit(make_train_step(loss_fn, optimizer))
    state, metrics = step(TrainState.create(0, {"w": jnp.float32(10)}, optimizer), jnp.array([3.0]))
    assert (float(metrics.sums["loss"]), float(metrics.grad_norm)) == (3, np.inf)
    assert (float(state.params["w"]), int(state.skipped)) == (10, 1)


def test_the_keys_of_a_seed_and_step_stay_the_same_whatever_was_left_out():
    # Others would change what a run learns when a later version resumes or repeats it.
    state = TrainState.create(3, {}, optax.sgd(1.0)).replace(step=jnp.int32(5), skipped=jnp.int32(2))
    keys = [jax.random.key_data(key).tolist() for key in (init_key(3), dropout_key(state))]
    assert keys == [[3716834203, 3481239269], [625863501, 109320485]]


@pytest.mark.parametrize("parts", ["micro-batches", "devices"])
def test_each_part_of_a_batch_has_random_numbers_of_its_own(parts):
    def loss_fn(params, batch, key):
        return {"loss": jnp.sum(batch) * jax.random.normal(key) * params["w"]}, {"loss": jnp.float32(batch.size)}

    optimizer, batch = optax.sgd(1.0), jnp.array([1.0, -1.0])
    state = TrainState.create(0, {"w": jnp.float32(1)}, optimizer)
    if parts == "devices":
        step = make_train_step(loss_fn, optimizer, axis_name="data")
        _, metrics = jax.vmap(step, in_axes=(None, 0), axis_name="data")(state, batch[:, None])
    else:
        _, metrics = make_train_step(loss_fn, optimizer, accumulation_steps=2)(state, batch)
    assert np.min(metrics.grad_norm) > 0.01  # equal ones would cancel each other


def test_parameters_that_are_not_trained_do_not_decay():
    def loss_fn(params, batch, key):
        return {"loss": jnp.sum(batch) * (params["w"] + params["frozen"])}, {"loss": jnp.float32(batch.size)}

    optimizer = skip_if_not_finite(optax.adamw(0.1, weight_decay=0.5))
    step = make_train_step(loss_fn, optimizer, trained=lambda tree: {**tree, "frozen": jnp.zeros_like(tree["frozen"])})
    params = {"w": jnp.float32(10), "frozen": jnp.float32(10)}
    state, metrics = jax.jit(step)(TrainState.create(0, params, optimizer), jnp.ones(3))
    assert (float(state.params["frozen"]), float(metrics.grad_norm)) == (10, 1)  # nor do they count where it is clipped
    assert float(state.params["w"]) == pytest.approx(10 - 0.1 - 0.1 * 0.5 * 10, rel=1e-5)

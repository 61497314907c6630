"""Updates that are left out, and the moving average of the parameters against sums written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_flax.training.optimizer import adam
from transformer_flax.training.step import TrainState, dropout_key, init_key, make_train_step, norm_by_rows, update_ema

STEPS = 40


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.9999])
def test_the_moving_average_is_the_weighted_mean_of_the_parameters_after_each_update(decay):
    params = np.random.default_rng(0).normal(size=(STEPS, 7)).astype(np.float32)
    update = jax.jit(update_ema, static_argnames="decay")
    ema = jnp.zeros(7)
    for step in range(1, STEPS + 1):
        ema = update(ema, params[step - 1], jnp.int32(step), decay=decay)
        weights = decay ** (step - np.arange(1, step + 1, dtype=np.float64))
        expected = (weights[:, None] * params[:step]).sum(0) / weights.sum()
        np.testing.assert_allclose(ema, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999, 0.9999])
def test_its_weights_sum_to_1_from_the_first_update_on(decay):
    update = jax.jit(update_ema, static_argnames="decay")
    ema = jnp.zeros(())
    for step in range(1, STEPS + 1):
        ema = update(ema, jnp.ones(()), jnp.int32(step), decay=decay)
        assert float(ema) == pytest.approx(1, abs=2e-6)


def test_a_step_averages_the_parameters_that_it_makes_and_leaves_them_alone():
    def loss_fn(params, batch, key):
        return {"loss": jnp.sum(batch) * params["w"]}, {"loss": jnp.float32(batch.size)}

    optimizer = optax.sgd(1.0)
    state = TrainState.create(0, {"w": jnp.float32(10)}, optimizer, keep_ema=True)
    plain = TrainState.create(0, {"w": jnp.float32(10)}, optimizer)
    step = jax.jit(make_train_step(loss_fn, optimizer, ema_decay=0.5))
    for gradient in (1.0, 2.0, 4.0):
        state, _ = step(state, jnp.full(3, gradient))
        plain, _ = step(plain, jnp.full(3, gradient))
    assert plain.ema is None
    assert float(state.params["w"]) == float(plain.params["w"]) == 3  # after 9 and 7
    assert float(state.ema["w"]) == pytest.approx((9 / 4 + 7 / 2 + 3) / (1 / 4 + 1 / 2 + 1))


def test_the_norm_by_rows_is_that_of_all_arrays_together():
    tree = {"scalar": jnp.float32(3), "vector": jnp.array([4.0]), "matrices": jnp.full((2, 3, 2), 2.0)}
    assert float(norm_by_rows(tree)) == pytest.approx((9 + 16 + 48) ** 0.5) == float(optax.tree.norm(tree))


@pytest.mark.parametrize("axis_name", [None, "data"], ids=["jit", "pmap"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38], ids=str)
def test_an_update_that_is_not_finite_is_as_if_it_had_not_been(axis_name, bad):
    """Of two devices, one has a bad value; the other must leave the update out too."""

    def loss_fn(params, batch, key):
        noise = jax.random.normal(key, ())
        return {"loss": jnp.sum(batch * params["w"] ** 2 + noise)}, {"loss": jnp.float32(batch.size)}

    optimizer = adam(lambda count: 0.1 / (1 + count), b1=0.9, b2=0.98, eps=1e-9)
    train_step = make_train_step(loss_fn, optimizer, ema_decay=0.5, axis_name=axis_name)
    batches = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)

    def run(batches, start):
        step = jax.pmap(train_step, axis_name=axis_name) if axis_name else jax.jit(train_step)
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


def test_the_keys_of_a_seed_and_step_stay_the_same_whatever_was_left_out():
    # Others would change what a run learns when a later version resumes or repeats it.
    state = TrainState.create(3, {}, optax.sgd(1.0)).replace(step=jnp.int32(5), skipped=jnp.int32(2))
    keys = [jax.random.key_data(key).tolist() for key in (init_key(3), dropout_key(state))]
    assert keys == [[3716834203, 3481239269], [625863501, 109320485]]

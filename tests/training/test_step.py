"""The moving average of the parameters, against sums written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_flax.training.step import TrainState, make_train_step, update_ema

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

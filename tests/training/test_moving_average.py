"""The moving averages of the parameters against sums written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.small import small_config
from transformer_flax.errors import UserError
from transformer_flax.training.config_checks import check
from transformer_flax.training.optimizer import exponential, schedule_free

STEPS = 40
DECAYS = (0.5, 0.9, 0.999, 0.9999)
# With the weights of the parameters after updates 1 to n.
AVERAGES = {decay: (exponential(decay), lambda n, d=decay: d ** np.arange(n - 1, -1, -1.0)) for decay in DECAYS} | {
    "schedule_free": (schedule_free(7, 0.9), lambda n: np.minimum(np.arange(1, n + 1) / 7, 1) ** 2)
}


@pytest.mark.parametrize("name", AVERAGES, ids=str)
def test_the_moving_average_is_the_weighted_mean_of_the_parameters_after_each_update(name):
    average, weights_of = AVERAGES[name]
    params = np.random.default_rng(0).normal(size=(STEPS, 7)).astype(np.float32)
    params[:, 0] = 1  # so weights sum to 1 from the first update on
    update = jax.jit(average.update)
    ema = jnp.full(7, 5.0)  # which has no weight
    for step in range(1, STEPS + 1):
        ema = update(ema, params[step - 1], jnp.int32(step))
        weights = weights_of(step)
        expected = (weights[:, None] * params[:step]).sum(0) / weights.sum()
        np.testing.assert_allclose(ema, expected, rtol=1e-5, atol=1e-6)
        assert float(ema[0]) == pytest.approx(1, abs=2e-6)


@pytest.mark.parametrize("name", AVERAGES, ids=str)
def test_what_does_not_change_has_exactly_itself_as_average(name):
    average, _ = AVERAGES[name]
    params = ema = jnp.asarray(np.random.default_rng(0).normal(size=1_000), jnp.float32)
    update = jax.jit(lambda ema, n: average.update(ema, average.where_gradients_are_taken(ema, params), n))
    for step in range(1, 10):
        ema = update(ema, jnp.int32(step))
    np.testing.assert_array_equal(ema, params)


def test_the_warm_up_of_schedule_free_may_be_long():
    assert float(schedule_free(50_000, 0.9).weight(jnp.int32(100_000))) == pytest.approx(1.5e-5, rel=1e-3)


def test_two_averages_are_refused():
    with pytest.raises(UserError, match=r"config\.ema_decay is 0\.9; it must be 0 with config\.optimizer\.name"):
        check(small_config(optimizer__name="schedule_free", ema_decay=0.9))

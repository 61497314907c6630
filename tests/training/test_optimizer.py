"""The learning rate, the optimizers, and the averages of parameters against sums written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import transformer_flax.relatives  # noqa: F401 (registers its kinds)
from configs import base, classifier, convolutional, recurrent
from tests.conftest import long
from tests.training.small import small_config
from transformer_flax.errors import UserError
from transformer_flax.model.registry import init_params, make_config
from transformer_flax.training.config_checks import check
from transformer_flax.training.config_fields import OptimizerConfig
from transformer_flax.training.optimizer import (
    adam,
    exponential,
    make_optimizer,
    make_schedule,
    muon,
    paper_schedule,
    schedule_free,
)


def test_the_schedule_is_equation_3_with_steps_from_1():
    schedule = paper_schedule(512, 4000)
    # 512^-0.5 = 0.0441942, 4000^-1.5 = 3.95285e-6
    assert float(schedule(0)) == pytest.approx(0.0441942 * 3.95285e-6, rel=1e-4)
    assert float(schedule(1999)) == pytest.approx(0.0441942 * 2000 * 3.95285e-6, rel=1e-4)
    assert float(schedule(3999)) == pytest.approx(6.987712e-4, rel=1e-4)  # the peak, d_model^-0.5 * warmup^-0.5
    assert float(schedule(99_999)) == pytest.approx(0.0441942 / 316.2278, rel=1e-4)


def test_warm_up_rises_and_then_falls():
    rates = np.array([float(paper_schedule(64, 10)(count)) for count in range(30)])
    assert np.argmax(rates) == 9
    assert (np.diff(rates[:10]) > 0).all()
    assert (np.diff(rates[9:]) < 0).all()


def test_the_first_update_of_adam_is_the_learning_rate_against_the_sign_of_the_gradient():
    config = base.get_config()
    optimizer = make_optimizer(config)
    params = {"w": jnp.array([1.0, -2.0])}
    updates, _ = optimizer.update({"w": jnp.array([0.3, -40.0])}, optimizer.init(params), params)
    rate = 512**-0.5 * 4000**-1.5
    np.testing.assert_allclose(updates["w"], [-rate, rate], rtol=1e-4)


def test_adam_is_that_of_optax_and_stands_still_where_it_is_told_to():
    def schedule(count):
        return 0.1 / (1 + count)

    ours = adam(schedule, b1=0.9, b2=0.98, eps=1e-9)
    theirs = optax.adam(schedule, b1=0.9, b2=0.98, eps=1e-9)
    update = jax.jit(ours.update)
    rng = np.random.default_rng(0)
    params = {"w": jnp.array(rng.normal(size=(5, 7)), jnp.float32)}
    state, expected = ours.init(params), theirs.init(params)
    for _ in range(20):
        grads = {"w": jnp.array(rng.normal(size=(5, 7)), jnp.float32)}
        wrong = jax.tree.map(lambda g: g * jnp.nan, grads)
        updates, stood_still = update(wrong, state, params, finite=jnp.array(False))
        jax.tree.map(np.testing.assert_array_equal, stood_still, state)
        updates, state = update(grads, state, params, finite=jnp.array(True))
        theirs_updates, expected = theirs.update(grads, expected, params)
        np.testing.assert_allclose(updates["w"], theirs_updates["w"], rtol=1e-5, atol=1e-8)


def test_a_run_has_the_adam_that_its_config_describes():
    config = base.get_config()
    config.optimizer.update(b1=0.5, b2=0.6, eps=0.1)
    ours, theirs = make_optimizer(config), optax.adam(make_schedule(config), b1=0.5, b2=0.6, eps=0.1)
    params = {"w": jnp.zeros(3)}
    state, expected = ours.init(params), theirs.init(params)
    for grads in ([0.3, -40.0, 0.01], [1.0, 0.1, -0.02]):
        updates, state = ours.update({"w": jnp.array(grads)}, state, params)
        theirs_updates, expected = theirs.update({"w": jnp.array(grads)}, expected, params)
        np.testing.assert_allclose(updates["w"], theirs_updates["w"], rtol=1e-5)


KINDS = {"transformer": base, "recurrent": recurrent, "convolutional": convolutional, "classifier": classifier}


@pytest.mark.parametrize("kind", ["transformer", long("recurrent"), long("convolutional"), "classifier"])
def test_muon_makes_the_update_of_every_matrix_orthogonal_and_adam_trains_the_rest(kind):
    config = KINDS[kind].get_config()
    # All heads together have more features than d_model: orthogonal as one matrix, they would not be orthogonal alone.
    sizes = {"num_layers": 1, "d_model": 12, "d_ff": 20, "num_heads": 4, "d_k": 6, "d_v": 5}
    config.model.update({name: value for name, value in sizes.items() if name in config.model} | {"dtype": "float32"})
    shapes = jax.eval_shape(lambda: init_params(make_config(29, config.model), jax.random.key(0)))
    rng = np.random.default_rng(0)
    params, grads = (jax.tree.map(lambda x: jnp.array(rng.normal(size=x.shape), x.dtype), shapes) for _ in range(2))
    optimizer = muon(lambda count: 0.5, b1=0.95, b2=0.98, eps=1e-9)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    updates, _ = update(grads, state, params)
    matrices = 0
    for path, change in jax.tree_util.tree_leaves_with_path(updates):
        if path[-1].key != "kernel":
            # The first of Adam with Nesterov's momentum.
            np.testing.assert_allclose(np.abs(change), np.abs(change).mean(), rtol=1e-3)
            continue
        by_head = path[-2].key in ("query", "key", "value") and change.ndim == 3  # the rivals' have no heads
        for matrix in np.moveaxis(change, 1, 0) if by_head else [np.reshape(change, (-1, change.shape[-1]))]:
            values = np.linalg.svd(matrix, compute_uv=False) / (0.5 * 0.2 * max(matrix.shape) ** 0.5)
            assert 0.5 < values.min() <= values.max() < 1.3, (path, values)
            matrices += 1
    assert matrices >= 4

    # After gradients of 1 and 0, Adam's second moment is (1 - b2) b2 / (1 - b2^2) = b2 / (1 + b2), and the first, with
    # Nesterov's momentum, (1 - b1) b1^2 / (1 - b1^3) = b1^2 / (1 + b1 + b1^2).
    other = muon(lambda count: 0.5, b1=0.5, b2=0.5, eps=1.0)
    last = [jax.tree.map(jnp.zeros_like, grads)] * 2
    for i, each in enumerate((optimizer, other)):
        _, after = jax.jit(each.update)(jax.tree.map(jnp.ones_like, grads), state, params)
        last[i], _ = jax.jit(each.update)(last[i], after, params)
    ratio = 0.25 / 1.75 / (np.sqrt(0.5 / 1.5) + 1) / (0.95**2 / (1.95 + 0.95**2) / np.sqrt(0.98 / 1.98))
    for path, quotient in jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda a, b: b / a, *last)):
        if path[-1].key != "kernel":
            np.testing.assert_allclose(quotient, ratio, rtol=1e-4, err_msg=str(path))

    zeros, _ = update(jax.tree.map(jnp.zeros_like, grads), state, params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(zeros))  # config.train_only leaves parameters as they are


NAMES = OptimizerConfig.__dataclass_fields__["name"].metadata["requirement"].removeprefix("one of ").split(", ")


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_stands_still_at_an_update_that_is_not_finite(name):
    config = base.get_config()
    config.optimizer.name = name
    params, grads = ({"a": {"kernel": jnp.full((3, 4), value), "bias": jnp.full(4, value)}} for value in (1.0, 0.5))
    optimizer = make_optimizer(config)
    update = jax.jit(optimizer.update)
    _, state = update(grads, optimizer.init(params), params, finite=jnp.array(True))
    _, stood_still = update(jax.tree.map(lambda g: g * jnp.nan, grads), state, params, finite=jnp.array(False))
    jax.tree.map(np.testing.assert_array_equal, stood_still, state)


@pytest.mark.parametrize("name", NAMES)
def test_updates_are_float32_where_jax_prefers_float64(name):
    config = base.get_config()
    config.optimizer.name = name
    params = {"a": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    with jax.enable_x64():
        updates, _ = jax.eval_shape(lambda grads: optimizer.update(grads, state, params, finite=True), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {np.dtype("float32")}


def test_schedule_free_keeps_the_peak_of_the_papers_rate():
    config = base.get_config()
    papers = make_schedule(config)
    config.optimizer.name = "schedule_free"
    rates = [make_schedule(config)(count) for count in (0, 3998, 3999, 50_000)]
    np.testing.assert_allclose(rates, [papers(0), papers(3998), papers(3999), papers(3999)])


def test_in_the_cooldown_the_papers_rate_falls_to_zero():
    config = base.get_config()
    papers = make_schedule(config)
    config.update(steps=10_000, optimizer={"cooldown": 0.4})
    rates = [make_schedule(config)(count) for count in (0, 3_999, 6_000, 8_000, 9_999, 10_000, 10_001)]
    expected = [papers(0), papers(3_999), papers(6_000), papers(8_000) / 2, papers(9_999) / 4_000, 0, 0]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_clipping_bounds_the_whole_gradient_and_is_off_in_the_paper():
    config = base.get_config()
    assert config.optimizer.clip_norm == 0
    plain = make_optimizer(config)
    config.optimizer.clip_norm = 5.0
    clipped = make_optimizer(config)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    big = {"a": jnp.array([30.0, 0.0]), "b": jnp.array([40.0])}  # norm 50
    small = jax.tree.map(lambda g: g / 10, big)
    _, after_small = plain.update(small, plain.init(params), params)
    for grads in (big, small):
        _, (_, after) = clipped.update(grads, clipped.init(params), params)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), after, after_small)


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


@pytest.mark.parametrize(("name", "value"), [("ema_decay", 0.9), ("optimizer.cooldown", 0.5)])
def test_schedule_free_is_alone(name, value):
    with pytest.raises(UserError, match=rf"config\.{name} is {value}; it must be 0.0 with schedule_free"):
        check(small_config(optimizer__name="schedule_free", **{name.replace(".", "__"): value}))

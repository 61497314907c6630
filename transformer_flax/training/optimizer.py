"""Adam and the paper's learning rate (section 5.3); Muon and Schedule-Free.

Schedule-Free and `config.ema_decay` keep an average of the parameters. Evaluations use the average instead of the
parameters.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

SCHEDULE_FREE = "schedule_free"  # config.optimizer.name
ADAMS_RMS = 0.2  # RMS of Adam's updates over the learning rate; Muon's are scaled to this RMS (Liu et al., 2025)


def paper_schedule(d_model: int, warmup_steps: int, factor: float = 1.0) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Returns equation 3 as a function of the number of earlier updates, which is step - 1.

    lrate = factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)
    """

    def learning_rate(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1  # optax counts from 0
        return factor * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return learning_rate


def make_schedule(config: ConfigDict) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Returns the learning rate of a run, as a function of the number of earlier updates.

    The rate is the paper's (`paper_schedule`). `cooldown` is the share of the steps, at the end of the run, in which
    the rate is also multiplied by a factor that falls linearly to zero (Hägele et al., 2024). With Schedule-Free, the
    rate stays at its peak after the warm-up.
    """
    c = config.optimizer
    schedule = paper_schedule(config.model.d_model, c.warmup_steps, c.factor)
    if c.name == SCHEDULE_FREE:
        return lambda count: schedule(jnp.minimum(count, c.warmup_steps - 1))
    if c.cooldown:
        return lambda count: schedule(count) * jnp.clip((config.steps - count) / (c.cooldown * config.steps), 0, 1)
    return schedule


def depends_on_steps(config: ConfigDict) -> bool:
    """Returns whether the learning rate of a run depends on `config.steps`."""
    return config.optimizer.cooldown > 0


def make_optimizer(config: ConfigDict) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of a run, with its learning rate and with clipping of the gradient's norm.

    With `update(..., finite=False)` the state does not change, and the caller must ignore the updates. An optimizer
    of optax needs `skip_if_not_finite` for that.
    """
    c = config.optimizer
    b1 = 0.0 if c.name == SCHEDULE_FREE else c.b1  # Schedule-Free has no momentum but the average
    make = {"adam": adam, "muon": muon, SCHEDULE_FREE: adam}[c.name]
    optimizer = make(make_schedule(config), b1=b1, b2=c.b2, eps=c.eps)
    return optax.chain(optax.clip_by_global_norm(c.clip_norm), optimizer) if c.clip_norm else optimizer


def skip_if_not_finite(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer of optax, so that `update(..., finite=False)` leaves its state unchanged."""

    def update(updates: Any, state: Any, params: Any = None, *, finite: Any = True, **_: Any) -> tuple[Any, Any]:
        updates, after = optimizer.update(updates, state, params)
        return updates, optax.tree.where(finite, after, state)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def adam(learning_rate: optax.Schedule, *, b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Returns Adam (Kingma and Ba, 2015, algorithm 1) as in optax, but each moment is read and written only once.

    Two choices avoid a copy of all moments at every step. First, `finite` is applied while the moments are computed,
    not afterwards, as by `skip_if_not_finite`. Second, the parameters' update is computed from the new moments. Without
    the barrier, XLA would compute it from the old moments, once more for each result.
    """

    def update(updates: Any, state: Any, params: Any = None, *, finite: Any = True, **_: Any) -> tuple[Any, Any]:
        count = state.count + finite
        mu = jax.tree.map(lambda g, m: jnp.where(finite, b1 * m + (1 - b1) * g, m), updates, state.mu)
        nu = jax.tree.map(lambda g, v: jnp.where(finite, b2 * v + (1 - b2) * g**2, v), updates, state.nu)
        mu, nu = jax.lax.optimization_barrier((mu, nu))
        rate = jnp.where(finite, learning_rate(state.count), 0)
        made = jnp.float32(count)
        m_weight, v_weight = 1 - b1**made, 1 - b2**made  # bias correction: what the weights of all gradients sum to
        updates = jax.tree.map(lambda m, v: -rate * (m / m_weight) / (jnp.sqrt(v / v_weight) + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)


def muon(learning_rate: optax.Schedule, *, b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Returns Muon (Jordan et al., 2024), with the learning rate of Adam (Liu et al., 2025, equation 4).

    The update of a matrix is its momentum with all singular values near 1, computed by Newton-Schulz iteration. Adam
    with Nesterov momentum trains all parameters that are not matrices of a layer: embeddings, biases, LayerNorm.
    """
    return skip_if_not_finite(
        optax.contrib.muon(
            learning_rate,
            beta=b1,
            adam_b1=b1,
            adam_b2=b2,
            eps=eps,
            consistent_rms=ADAMS_RMS,
            muon_weight_dimension_numbers=matrices,
        )
    )


def matrices(params: Any) -> Any:
    """Returns, for optax, the input axes and output axes of each layer's kernel; None for other parameters.

    A kernel with the W_i^Q, W_i^K or W_i^V of all heads, [d_model, H, d_k], is H matrices, each orthogonal by itself
    (section 3.2.2; GLM-5 Team, 2026). Any other kernel is one matrix with one output axis, the last. Several input axes
    may precede it: W^O [H, d_v, d_model], a convolution [width, inputs, outputs].
    """

    def axes(path: Any, leaf: Any) -> Any:
        *_, module, name = ("", *(part.key for part in path))
        if name != "kernel":
            return None
        inputs = 1 if module in ("query", "key", "value") else leaf.ndim - 1
        # The axis of heads is neither input nor output, so each head is a matrix of its own.
        return optax.contrib.MuonDimensionNumbers(tuple(range(inputs)), leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)


class Average(NamedTuple):
    """A weighted mean of the parameters after each update. The initial parameters have no weight."""

    weight: Callable[[jax.Array], jax.Array]  # of the newest parameters, by number of updates; 1 after the first
    pull: float = 0.0  # gradients are taken at (1 - pull) * parameters + pull * average

    def update(self, average: Any, params: Any, updates: jax.Array) -> Any:
        """Returns the average after update number `updates`, which produced `params`."""
        return interpolate(average, params, self.weight(updates))

    def where_gradients_are_taken(self, average: Any, params: Any) -> Any:
        return interpolate(params, average, self.pull) if self.pull else params


def interpolate(old: Any, new: Any, weight: jax.typing.ArrayLike) -> Any:
    """Returns old + weight (new - old): exactly `old` where both are equal, as for parameters that are not trained."""
    return jax.tree.map(lambda old, new: old + weight * (new - old), old, new)


def exponential(decay: float) -> Average:
    """Returns an average in which the weight of the parameters of update i is proportional to decay^(updates - i)."""
    return Average(lambda updates: (1 - decay) / -jnp.expm1(updates * math.log(decay)))  # divisor: 1 - decay^updates


def schedule_free(warmup_steps: int, pull: float) -> Average:
    """Returns Schedule-Free's mean (Defazio et al., 2024, algorithm 1).

    The weight of the parameters of an update is proportional to the square of the update's learning rate. The learning
    rate rises for `warmup_steps` updates and then stays constant.
    """

    def weight(updates: jax.Array) -> jax.Array:
        step = updates.astype(jnp.float32)
        warm = jnp.minimum(step, warmup_steps)
        # The divisor sums the squares of 1 to `warm` and the squares of the constant rate. Rates are in units of the
        # first rate, so the first weight is exactly 1: of the initial parameters, nothing but rounding is left.
        return warm**2 / (warm * (warm + 1) * (2 * warm + 1) / 6 + (step - warm) * float(warmup_steps) ** 2)

    return Average(weight, pull)


def keeps_average(config: ConfigDict) -> bool:
    """Returns whether a run with this config keeps an average of its parameters."""
    return make_average(config) is not None


def make_average(config: ConfigDict) -> Average | None:
    """Returns the average that a run with this config keeps, or None."""
    if config.optimizer.name == SCHEDULE_FREE:
        return schedule_free(config.optimizer.warmup_steps, config.optimizer.b1)
    return exponential(config.ema_decay) if config.ema_decay else None

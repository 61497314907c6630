"""Adam and the paper's learning rate (section 5.3); Muon and Schedule-Free.

Schedule-Free and `config.ema_decay` keep an average of the parameters, which evaluations use in their place.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from transformer_flax.errors import UserError

SCHEDULE_FREE = "schedule_free"  # config.optimizer.name
MUON = "muon"
ADAMS_RMS = 0.2  # of Adam's updates, relative to its rate; Muon's are scaled to the same (Liu et al., 2025)


def paper_schedule(d_model: int, warmup_steps: int, factor: float = 1.0) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """lrate = factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), equation 3; step counts from 1."""

    def learning_rate(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1  # optax counts from 0
        return factor * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return learning_rate


def make_schedule(config, d_model: int) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The learning rate of `config.optimizer`: the paper's, which with Schedule-Free stays at its peak."""
    schedule = paper_schedule(d_model, config.warmup_steps, config.factor)
    if config.name == SCHEDULE_FREE:
        return lambda count: schedule(jnp.minimum(count, config.warmup_steps - 1))
    return schedule


def make_optimizer(config, d_model: int) -> optax.GradientTransformation:
    """The optimizer of `config.optimizer` under its schedule, with clipping of the gradient's norm."""
    b1 = 0.0 if config.name == SCHEDULE_FREE else config.b1  # its momentum is in where gradients are taken
    make = muon if config.name == MUON else adam
    optimizer = make(make_schedule(config, d_model), b1=b1, b2=config.b2, eps=config.eps)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer) if config.clip_norm else optimizer


def adam(learning_rate: optax.Schedule, *, b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Adam (Kingma and Ba, 2015, algorithm 1), the same as optax's, but each moment is read and written once.

    With `update(..., finite=False)` nothing changes. Were that decided afterwards, or were the parameters' update
    computed from the old moments, which XLA would do once more for each of its results, all moments would be copied at
    every step.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        grads, finite = updates, extra.get("finite", True)
        count = state.count + finite
        mu = jax.tree.map(lambda g, m: jnp.where(finite, b1 * m + (1 - b1) * g, m), grads, state.mu)
        nu = jax.tree.map(lambda g, v: jnp.where(finite, b2 * v + (1 - b2) * g**2, v), grads, state.nu)
        mu, nu = jax.lax.optimization_barrier((mu, nu))
        rate = jnp.where(finite, learning_rate(state.count), 0)
        mean, variance = 1 - b1**count, 1 - b2**count  # of a constant 1, from the zeros that the moments start with
        updates = jax.tree.map(lambda m, v: -rate * (m / mean) / (jnp.sqrt(v / variance) + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def muon(learning_rate: optax.Schedule, *, b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Muon (Jordan et al., 2024), with the learning rate of Adam (Liu et al., 2025, equation 4).

    The update of a matrix is its momentum with all singular values near 1, by Newton and Schulz's iteration. Adam, with
    Nesterov's momentum, trains what is no matrix of a layer: embeddings, biases, LayerNorm.

    With `update(..., finite=False)` nothing changes.
    """
    optimizer = optax.contrib.muon(
        learning_rate,
        beta=b1,
        adam_b1=b1,
        adam_b2=b2,
        eps=eps,
        consistent_rms=ADAMS_RMS,
        muon_weight_dimension_numbers=matrices,
    )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        finite = extra.get("finite", True)
        updates, after = optimizer.update(updates, state, params)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0), updates)
        return updates, jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def matrices(params: Any) -> Any:
    """The axes of each layer's kernel that are a matrix's inputs and outputs, for optax; None for other parameters.

    W^Q, W^K and W^V [d_model, H, d_k] have two axes of outputs. All other kernels have one, the last, and several of
    inputs may precede it: W^O [H, d_v, d_model], a convolution [width, inputs, outputs].
    """

    def axes(path: Any, leaf: Any) -> Any:
        *_, module, name = ("", *(part.key for part in path))
        if name != "kernel":
            return None
        inputs = 1 if module in ("query", "key", "value") else leaf.ndim - 1
        return optax.contrib.MuonDimensionNumbers(tuple(range(inputs)), tuple(range(inputs, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(axes, params)


class Average(NamedTuple):
    """A weighted mean of the parameters after each update; their initial values have no weight."""

    weight: Callable[[jax.Array], jax.Array]  # of the newest, after so many updates: 1 after the first
    pull: float = 0.0  # gradients are taken at (1 - pull) parameters + pull average

    def update(self, average: Any, params: Any, updates: jax.Array) -> Any:
        """The average after update number `updates`, which made `params`."""
        return optax.incremental_update(params, average, self.weight(updates))

    def where_gradients_are_taken(self, average: Any, params: Any) -> Any:
        return optax.incremental_update(average, params, self.pull) if self.pull else params


def exponential(decay: float) -> Average:
    """Parameters of update i are weighted by decay^(updates - i)."""
    return Average(lambda updates: (1 - decay) / -jnp.expm1(updates * math.log(decay)))  # below: 1 - decay^updates


def schedule_free(warmup_steps: int, pull: float) -> Average:
    """Schedule-Free's mean (Defazio et al., 2024, algorithm 1): parameters weigh the square of their learning rate.

    The rate rises for `warmup_steps` updates and then stays.
    """

    def weight(updates: jax.Array) -> jax.Array:
        step = updates.astype(jnp.float32)
        warm = jnp.minimum(step, warmup_steps)
        # The squares of 1 to `warm`, and then those of a rate that stays. No square is divided: so the first weight is
        # 1 exactly, and nothing of the initial values is left.
        return warm**2 / (warm * (warm + 1) * (2 * warm + 1) / 6 + (step - warm) * warmup_steps**2)

    return Average(weight, pull)


def keeps_average(config: ConfigDict) -> bool:
    """Whether a run with this config keeps an average of its parameters."""
    return config.ema_decay > 0 or config.optimizer.name == SCHEDULE_FREE


def make_average(config: ConfigDict) -> Average | None:
    """The average that a run with this config keeps, if any.

    Raises:
      UserError: it would keep two.
    """
    if config.optimizer.name != SCHEDULE_FREE:
        return exponential(config.ema_decay) if config.ema_decay else None
    if config.ema_decay:
        raise UserError(
            f"config.ema_decay is {config.ema_decay}; it must be 0 with config.optimizer.name 'schedule_free', which "
            "keeps an average of its own"
        )
    return schedule_free(config.optimizer.warmup_steps, config.optimizer.b1)

"""Adam and the paper's learning rate (section 5.3)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer_flax.errors import UserError


def paper_schedule(d_model: int, warmup_steps: int, factor: float = 1.0) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """lrate = factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), equation 3; step counts from 1."""

    def learning_rate(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1  # optax counts from 0
        return factor * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return learning_rate


def make_schedule(config, d_model: int) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The learning rate of `config.optimizer`."""
    return paper_schedule(d_model, config.warmup_steps, config.factor)


def make_optimizer(config, d_model: int) -> optax.GradientTransformation:
    """The optimizer of `config.optimizer`: Adam under the paper's schedule, with clipping of the gradient's norm."""
    for name in ("warmup_steps", "eps", "factor"):
        if not config[name] > 0:
            raise UserError(f"config.optimizer.{name} is {config[name]}; it must be above 0")
    for name in ("b1", "b2"):
        if not 0 <= config[name] < 1:
            raise UserError(f"config.optimizer.{name} is {config[name]}; it must be from 0 to below 1")
    if config.clip_norm < 0:
        raise UserError(f"config.optimizer.clip_norm is {config.clip_norm}; it must be above 0, or 0 for no clipping")
    optimizer = adam(make_schedule(config, d_model), b1=config.b1, b2=config.b2, eps=config.eps)
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

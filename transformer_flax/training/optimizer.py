"""Adam and the paper's learning rate (section 5.3)."""

from collections.abc import Callable

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
    schedule = paper_schedule(d_model, config.warmup_steps, config.factor)
    adam = optax.adam(schedule, b1=config.b1, b2=config.b2, eps=config.eps)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adam) if config.clip_norm else adam

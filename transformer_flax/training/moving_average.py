"""The average of the parameters that a state keeps beside them, which evaluations use in their place."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from transformer_flax.errors import UserError

SCHEDULE_FREE = "schedule_free"  # config.optimizer.name


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

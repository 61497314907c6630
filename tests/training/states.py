"""States that are told apart at a glance."""

import jax.numpy as jnp
import optax

from transformer_flax.training.step import TrainState

OPTIMIZER = optax.sgd(0.1)


def state_at(step: int, size: int = 8) -> TrainState:
    """A state whose parameters are its step."""
    state = TrainState.create(0, {"w": jnp.full(size, step, jnp.float32)}, OPTIMIZER)
    return state.replace(step=jnp.int32(step))

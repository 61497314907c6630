"""Dropout (section 5.4), switched on by being given a key."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Dropout(nn.Module):
    """Sets a share `rate` of the elements to zero and scales the others by 1 / (1 - rate).

    Active exactly when `apply` is given `rngs={"dropout": key}`: no flag travels through the model.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.rate == 0 or not self.has_rng("dropout"):
            return x
        keep = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.rate, x.shape)
        return jnp.where(keep, x / (1 - self.rate), 0)

"""Dropout (section 5.4), and the cheap random bits that it draws."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class Dropout(nn.Module):
    """Dropout (section 5.4): sets a share `rate` of the elements to zero and scales the others by 1 / (1 - rate).

    Dropout is active exactly when `apply` is given `rngs={"dropout": key}`. So the model's methods need no flag.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.rate == 0 or not self.has_rng("dropout"):
            return x
        dropped = random_bits(self.make_rng("dropout"), x.shape) < np.uint32(self.rate * 2**32)
        return jnp.where(dropped, 0, x / (1 - self.rate))


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns 32 random bits for each element: uint32 [shape].

    The bits are a hash of the element's index and the key. Each word of the key takes one round of `lowbias32`
    (Wellons, 2018). XLA fuses these few operations into the operations that use the bits. The 20 rounds of JAX's
    threefry, a cryptographic generator, would take about 5 % of a training step.
    """
    bits = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    for word in jax.random.key_data(key):
        bits = _mix(bits ^ word)
    return bits


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)

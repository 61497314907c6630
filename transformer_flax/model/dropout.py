"""Dropout (section 5.4), switched on by being given a key."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class Dropout(nn.Module):
    """Sets a share `rate` of the elements to zero and scales the others by 1 / (1 - rate).

    Active exactly when `apply` is given `rngs={"dropout": key}`: no flag travels through the model.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.rate == 0 or not self.has_rng("dropout"):
            return x
        dropped = random_bits(self.make_rng("dropout"), x.shape) < np.uint32(self.rate * 2**32)
        return jnp.where(dropped, 0, x / (1 - self.rate))


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits for each element: uint32 [shape].

    They are a hash of the element's number and the key, in a round for each word of the key of the best of Wellons'
    (2018) search for good 32-bit mixers. It takes a few operations, fused into what uses the bits, where the 20 rounds
    of JAX's own threefry, made to resist whoever wants to guess, would take a tenth of a step.
    """
    bits = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    for word in jax.random.key_data(key):
        bits = _mix(bits ^ word)
    return bits


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)

"""Table 1: the costs of each kind of layer, and the layers, which `table1.py` times.

n is the length of the sequence, d the width of its representations, k the width of a convolution's kernel, and r the
size of the neighbourhood of restricted self-attention. Constants are left out, as in the paper.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.model.attention import attention_weights
from transformer_flax.model.local_attention import attend_locally

Apply = Callable[..., jax.Array]  # (x [n, d], dilation) -> [n, d]


class Costs(NamedTuple):
    """The three columns of the table."""

    operations: float  # complexity of a layer
    sequential: float  # operations that cannot run in parallel
    path: float  # longest path between two positions


LAYERS: dict[str, Callable[[int, int, int, int], Costs]] = {  # functions of n, d, k and r
    "self-attention": lambda n, d, k, r: Costs(n**2 * d, 1, 1),
    "recurrent": lambda n, d, k, r: Costs(n * d**2, n, n),
    "convolutional": lambda n, d, k, r: Costs(k * n * d**2, 1, math.log(n, k)),
    # from the text beside the table
    "separable convolutional": lambda n, d, k, r: Costs(k * n * d + n * d**2, 1, math.log(n, k)),
    "restricted self-attention": lambda n, d, k, r: Costs(r * n * d, 1, n / r),
}


def _attend(query, key, value, mask):
    return jnp.einsum("bhqm,bmhv->bqhv", attention_weights(query, key, mask), value)


def self_attention(x: jax.Array, dilation: int = 1, *, heads: int, r: int = 0) -> jax.Array:
    """Attends from x to itself by equation 1, in heads, to all positions or to a neighbourhood of r."""
    split = x.reshape(1, len(x), heads, -1)
    mask = jnp.ones((1, 1, 1, len(x)), bool)
    mixed = attend_locally(_attend, split, split, split, mask, r) if r else _attend(split, split, split, mask)
    return mixed.reshape(x.shape)


def recurrent(x: jax.Array, dilation: int = 1, *, inner: jax.Array, outer: jax.Array) -> jax.Array:
    """h_t = tanh(x_t U + h_(t-1) W), one position after the other."""

    def cell(state, x):
        state = jnp.tanh(x @ inner + state @ outer)
        return state, state

    return jax.lax.scan(cell, jnp.zeros(x.shape[1]), x)[1]


def recurrent_once(x: jax.Array, dilation: int = 1, *, inner: jax.Array, outer: jax.Array) -> jax.Array:
    """Applies the cell of `recurrent` once at all positions: each state moves one position."""
    return jnp.tanh(x @ inner + _shift(x, 1) @ outer)


def convolutional(x: jax.Array, dilation: int = 1, *, kernel: jax.Array) -> jax.Array:
    """sum_i x_(t - i dilation) W_i, with W [k, d, d]."""
    return sum((_shift(x, i * dilation) @ matrix for i, matrix in enumerate(kernel)), jnp.zeros(x.shape))


def separable(x: jax.Array, dilation: int = 1, *, depthwise: jax.Array, pointwise: jax.Array) -> jax.Array:
    """`convolutional` with W_i = diag(w_i) P: w [k, d] acts on each feature, then P [d, d] on all of a position."""
    each = sum((_shift(x, i * dilation) * weights for i, weights in enumerate(depthwise)), jnp.zeros(x.shape))
    return each @ pointwise


def _shift(x: jax.Array, by: int) -> jax.Array:
    """x_(t - by), with zeros before the beginning."""
    return jnp.pad(x, ((by, 0), (0, 0)))[: len(x)]


def make_layers(d: int, heads: int, k: int, r: int) -> dict[str, Apply]:
    """Makes the layers of `LAYERS` by name, with random parameters."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.array(rng.normal(size=shape) / math.sqrt(d), jnp.float32)

    return {
        "self-attention": functools.partial(self_attention, heads=heads),
        "recurrent": functools.partial(recurrent, inner=normal(d, d), outer=normal(d, d)),
        "convolutional": functools.partial(convolutional, kernel=normal(k, d, d)),
        "separable convolutional": functools.partial(separable, depthwise=normal(k, d), pointwise=normal(d, d)),
        "restricted self-attention": functools.partial(self_attention, heads=heads, r=r),
    }


def applied_once(layers: Mapping[str, Apply]) -> dict[str, Apply]:
    """Replaces the recurrent layer with one application of its cell, the operation that its path counts."""
    whole: functools.partial = layers["recurrent"]
    return {**layers, "recurrent": functools.partial(recurrent_once, **whole.keywords)}


def path_length(layer: Apply, n: int, d: int, dilations: Callable[[int], int] = lambda depth: 1) -> int:
    """Returns the number of layers after which the last position's output depends on the first position's input.

    The derivative of each layer along the positions reached so far shows which positions it reaches. Only the set of
    positions is kept, because derivatives of far positions would soon be too small for a float.
    A layer has n positions of d features. `dilations` gives the dilation of a convolution at a depth, counted from 0.
    """
    derivative = jax.jit(
        lambda x, tangent, dilation: jax.jvp(lambda x: layer(x, dilation), (x,), (tangent,))[1], static_argnums=2
    )
    rng = np.random.default_rng(0)
    reached = np.arange(n) == 0
    for depth in range(n):
        x, direction = rng.normal(size=(2, n, d)).astype(np.float32)
        reached = np.any(derivative(x, direction * reached[:, None], dilations(depth)) != 0, axis=1)
        if reached[-1]:
            return depth + 1
    raise AssertionError(f"the last of {n} positions is not reached")

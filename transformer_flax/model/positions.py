"""Positional encodings (section 3.5), and relative and rotary positions."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.errors import UserError
from transformer_flax.model.config import DISTANCES, SINUSOIDS, LayerConfig


def sinusoids(length: int, d_model: int, *, concatenated: bool = False) -> np.ndarray:
    """Returns the paper's sinusoids (section 3.5), float32 [length, d_model].

        PE(pos, 2i)   = sin(pos / 10000^(2i / d_model))
        PE(pos, 2i+1) = cos(pos / 10000^(2i / d_model))

    With `concatenated`, all sines come before all cosines, and the exponent is i / (d_model/2 - 1), as in the authors'
    released code. This is more than a permutation: its longest timescale is 10000; the paper's is shorter.
    """
    half = d_model // 2
    exponent = np.arange(half) / max(half - 1, 1) if concatenated else np.arange(half) * 2 / d_model
    angle = np.arange(length)[:, None] / 10000.0**exponent
    pair = np.stack([np.sin(angle), np.cos(angle)], axis=-2 if concatenated else -1)
    return pair.reshape(length, d_model).astype(np.float32)


class Positions(nn.Module):
    """Encodings of positions 0 .. length - 1, [length, d_model]: sinusoids (section 3.5), or learned (table 3, row E).

    The encodings are zeros if self-attention uses relative or rotary positions instead.
    """

    config: Any  # has positions, d_model and max_length

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        c = self.config
        if c.positions in DISTANCES:
            return jnp.zeros((length, c.d_model))
        if c.positions in SINUSOIDS:
            return jnp.asarray(sinusoids(length, c.d_model, concatenated=c.positions == "sinusoidal_concatenated"))
        if length > c.max_length:
            raise UserError(
                f"a sequence of {length} positions is longer than the {c.max_length} that were learned; "
                "shorten it, or train with a larger config.model.max_length"
            )
        table = self.param("table", nn.initializers.normal(c.d_model**-0.5), (c.max_length, c.d_model))
        return table[:length]


def positions_in_segments(segments: jax.Array) -> jax.Array:
    """Returns the position of each token in its own sentence, counted from 0: segments [B, L] -> [B, L]."""
    column = jnp.arange(segments.shape[1])
    begins = segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    return column - jax.lax.cummax(jnp.where(begins, column, 0), axis=1)


def rotate(x: jax.Array, turns: jax.Array) -> jax.Array:
    """Rotates queries or keys by angles that depend on their positions: rotary positions (Su et al., 2021).

    The pair of features (2i, 2i+1) is rotated by the angle pos / 10000^(2i / d_k) of the paper's sinusoids. The product
    of a query at position m and a key at position n then depends on the positions only through n - m.

    x [B, P, H, d_k], turns [P | 1, d_k] -> [B, P, H, d_k]. `turns` are the sines and cosines of the angles, as
    `sinusoids` returns them. With [1, d_k], all P positions turn by the same angles.
    """
    sine, cosine = turns[:, None, 0::2], turns[:, None, 1::2]  # [P, 1, d_k / 2]
    first, second = x[..., 0::2], x[..., 1::2]
    turned = jnp.stack([first * cosine - second * sine, first * sine + second * cosine], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def distances_between(queries: int, keys: int) -> jax.Array:
    """Returns the positions of the keys minus the positions of the queries, [queries, keys].

    If there are more keys than queries, half of the additional keys are to the left of the queries and half to the
    right, as in the blocks of `attend_locally`.
    """
    return jnp.arange(keys) - (keys - queries) // 2 - jnp.arange(queries)[:, None]


class Distances(nn.Module):
    """Relative positions (Shaw et al., 2018): learned embeddings of distances, [...] -> [..., d_k], added to keys.

    All heads of a layer share the embeddings. Larger distances are clipped to `clip_distance`. Nothing is added to the
    values, as Shaw et al. found no use in it. The decoder does not look ahead, so it learns only the embeddings of
    distances up to 0.
    """

    config: LayerConfig

    @nn.compact
    def __call__(self, distances: jax.Array) -> jax.Array:
        c = self.config
        farthest = c.clip_distance
        table = self.param("table", nn.initializers.xavier_uniform(), (2 * farthest + 1, c.d_k))
        return table[jnp.clip(distances, -farthest, farthest) + farthest].astype(c.dtype)

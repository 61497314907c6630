"""Where in the sentence a word stands (section 3.5)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.errors import UserError
from transformer_flax.model.config import DISTANCES, EncoderConfig


def sinusoids(length: int, d_model: int, *, concatenated: bool = False) -> np.ndarray:
    """The paper's sinusoids, float32 [length, d_model]:

        PE(pos, 2i)   = sin(pos / 10000^(2i / d_model))
        PE(pos, 2i+1) = cos(pos / 10000^(2i / d_model))

    With `concatenated`, the authors' released code instead: all sines, then all cosines, with the exponent
    i / (d_model/2 - 1). It is no mere permutation: its longest timescale is 10000, the paper's is below that.
    """
    half = d_model // 2
    exponent = np.arange(half) / max(half - 1, 1) if concatenated else np.arange(half) * 2 / d_model
    angle = np.arange(length)[:, None] / 10000.0**exponent
    pair = np.stack([np.sin(angle), np.cos(angle)], axis=-2 if concatenated else -1)
    return pair.reshape(length, d_model).astype(np.float32)


def positions_in_segments(segments: jax.Array) -> jax.Array:
    """Where each token stands in its own sentence, for several sentences in a row: [B, L] segments -> [B, L] from 0."""
    column = jnp.arange(segments.shape[1])
    begins = segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    return column - jax.lax.cummax(jnp.where(begins, column, 0), axis=1)


class Positions(nn.Module):
    """The encodings of positions 0 .. length - 1, [length, d_model]: sinusoids, or learned (table 3, row E).

    They are zeros where self-attention is told distances in their place (`relative`).
    """

    config: Any  # with positions, d_model and max_length

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        c = self.config
        if c.positions in DISTANCES:
            return jnp.zeros((length, c.d_model))
        if c.positions != "learned":
            return jnp.asarray(sinusoids(length, c.d_model, concatenated=c.positions == "sinusoidal_concatenated"))
        if length > c.max_length:
            raise UserError(
                f"a sequence of {length} positions is longer than the {c.max_length} that were learned; "
                "shorten it, or train with a larger config.model.max_length"
            )
        table = self.param("table", nn.initializers.normal(c.d_model**-0.5), (c.max_length, c.d_model))
        return table[:length]


def rotate(x: jax.Array, sinusoids: jax.Array) -> jax.Array:
    """Queries or keys turned by their positions: rotary positions (Su et al., 2021).

    At pos, the pair of features (2i, 2i+1) is turned by the angle that the paper's sinusoids have there, pos /
    10000^(2i / d_k). The product of a query at m and a key at n is that of the query and the key turned by n - m: it
    depends on nothing but how far apart they stand.

    Args:
      x: [B, P, H, d_k], or with one position for all of P.
      sinusoids: [P, d_k], or [1, d_k], those of `positions.sinusoids`: they are sine and cosine of the angles.
    """
    sine, cosine = sinusoids[:, None, 0::2], sinusoids[:, None, 1::2]  # [P, 1, d_k / 2]
    first, second = x[..., 0::2], x[..., 1::2]
    turned = jnp.stack([first * cosine - second * sine, first * sine + second * cosine], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def apart(queries: int, keys: int) -> jax.Array:
    """How far behind each query a key stands, [queries, keys]; below 0 where it stands before.

    The keys are the positions of the queries and, if there are more, as many to the left of them as to the right, as in
    the blocks of `neighbourhood.attend_nearby`.
    """
    return jnp.arange(keys) - (keys - queries) // 2 - jnp.arange(queries)[:, None]


class Distances(nn.Module):
    """Learned embeddings of distances, [...] -> [..., d_k], to be added to keys: relative positions.

    After Shaw et al. (2018): all heads of a layer share them, and what is farther than `clip_distance` counts as that
    far. They found that embeddings added to the values bring nothing more, so there are none here. The decoder, which
    does not look ahead, learns those below 1 only.
    """

    config: EncoderConfig

    @nn.compact
    def __call__(self, distances: jax.Array) -> jax.Array:
        c = self.config
        farthest = c.clip_distance
        table = self.param("table", nn.initializers.xavier_uniform(), (2 * farthest + 1, c.d_k))
        return table[jnp.clip(distances, -farthest, farthest) + farthest].astype(c.dtype)

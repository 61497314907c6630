"""How far apart words stand, told to self-attention in place of where each stands (not in the paper).

Attention then sees no position at all but through distances. Several sentences in a row need nothing more, as within
each of them distances are what they would be in a row of its own. Letters of shapes: B batch, P positions, H heads.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.config import EncoderConfig


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

"""Attention scores of queries and keys, before the softmax: the compatibility function (section 3.2.1).

Letters of shapes: B batch, Q queries, M keys, H heads, K hypotheses of a search.
"""

import dataclasses

import jax
import jax.numpy as jnp

from transformer_flax.model.linear import product_of_few_rows, wide_einsum


@dataclasses.dataclass(frozen=True)
class Dot:
    """Dot-product scores: q . k / sqrt(d_k), as in equation 1; q . k if not `scaled` (section 3.2.1).

    If the features of q and k are independent, with mean 0 and variance 1, q . k has variance d_k. If this variance is
    large, the softmax is close to 1 for one key, and its gradient is close to 0 (section 3.2.1).
    """

    scaled: bool = True

    def full(self, query: jax.Array, key: jax.Array, offsets: jax.Array | None = None) -> jax.Array:
        """Computes the scores of whole sentences: [B, Q, H, d_k] and [B, M, H, d_k] -> float32 [B, H, Q, M].

        With `offsets` [Q, M, d_k], `offsets[q, m]` is added to key m for query q (`positions.Distances`).
        """
        products = wide_einsum("bqhd,bmhd->bhqm", query, key)
        if offsets is not None:  # q . (k + a) = q . k + q . a avoids an array [B, Q, M, H, d_k]
            products += wide_einsum("bqhd,qmd->bhqm", query, offsets)
        return self._scale(products, query.shape[-1])

    def cached(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Computes the scores of a decoding step: [B, K, H, d_k] and [B, H, d_k, M] -> float32 [B, H, K, M]."""
        return self._scale(product_of_few_rows(query.swapaxes(1, 2), key), query.shape[-1])

    def _scale(self, products: jax.Array, d_k: int) -> jax.Array:
        return products / d_k**0.5 if self.scaled else products


@dataclasses.dataclass(frozen=True, eq=False)
class Additive:
    """Additive scores v . tanh(q + k), a hidden layer of size d_k (section 3.2.1; Bahdanau et al., 2015).

    As in other scores, q = x W^Q and k = x W^K. The hidden layer of every query and key needs memory for
    [B, H, Q, M, d_k] elements; a dot product needs [B, H, Q, M].
    """

    v: jax.Array  # [H, d_k]

    def full(self, query: jax.Array, key: jax.Array, offsets: jax.Array | None = None) -> jax.Array:
        key = key[:, None]  # [B, 1, M, H, d_k]
        if offsets is not None:
            key += offsets[:, :, None]
        hidden = jnp.tanh(query[:, :, None] + key)  # [B, Q, M, H, d_k]
        return wide_einsum("bqmhd,hd->bhqm", hidden, self.v.astype(hidden.dtype))

    def cached(self, query: jax.Array, key: jax.Array) -> jax.Array:
        query = query.swapaxes(1, 2)[..., None].astype(jnp.float32)  # [B, H, K, d_k, 1]
        hidden = jnp.tanh(query + key[:, :, None])  # with [B, H, 1, d_k, M]
        return jnp.sum(self.v[:, None, :, None] * hidden, axis=-2)


ScoreFunction = Dot | Additive  # `full` and `cached` take queries and keys in different layouts

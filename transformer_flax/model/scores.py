"""Attention scores of queries and keys, before the softmax: the compatibility function (section 3.2.1).

Letters of shapes: B batch, Q queries, M keys, H heads, K hypotheses of a search.
"""

import dataclasses

import jax
import jax.numpy as jnp

from transformer_flax.model.linear import wide_einsum


def product_of_few_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes the matrix products x y of a decoding step: [B, H, K, D], [B, H, D, M] -> float32 [B, H, K, M].

    On a CPU, several rows use sums of products. A matrix product of a few rows would first repack all of y, which takes
    several times as long (docs/log.md, "Following a beam's ancestors"). A single row uses the product of a vector and a
    matrix, which repacks nothing and is several times as fast as the sums. Other devices use matrix products, because
    the sums would write y in float32.
    """

    def multiply(x, y):
        return jnp.einsum("bhkd,bhdm->bhkm", x.astype(y.dtype), y, preferred_element_type=jnp.float32)

    def sum_products(x, y):
        return jnp.sum(x[..., None].astype(jnp.float32) * y[:, :, None], axis=-2)  # [B, H, K, D, M] -> [B, H, K, M]

    return multiply(x, y) if x.shape[2] == 1 else jax.lax.platform_dependent(x, y, cpu=sum_products, default=multiply)


@dataclasses.dataclass(frozen=True)
class Dot:
    """Dot-product scores: q . k / sqrt(d_k), as in equation 1; q . k if not `scaled` (section 3.2.1).

    If the features of q and k are independent, with mean 0 and variance 1, q . k has variance d_k. If this variance is
    large, the softmax is close to 1 for one key, and its gradient is close to 0 (section 3.2.1).
    """

    scaled: bool = True

    def full(self, query: jax.Array, key: jax.Array, offsets: jax.Array | None = None) -> jax.Array:
        """Computes the scores of whole sentences: [B, Q, H, d_k] and [B, M, H, d_k] -> float32 [B, H, Q, M].

        With `offsets` [Q, M, d_k], [q, m] is added to key m for query q (`positions.Distances`).
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

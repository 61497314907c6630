"""How well a query and a key go together (section 3.2.1): that of which attention's weights are the softmax.

Letters of shapes: B batch, Q queries, M keys, H heads, K hypotheses of a search.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp


class Compatibility(Protocol):
    """A function of a query and a key, in the two layouts in which attention has them; the results are float32."""

    def of_all(self, query: jax.Array, key: jax.Array, offsets: jax.Array | None = None) -> jax.Array:
        """Of the queries and keys of whole sentences.

        Args:
          query: [B, Q, H, d_k].
          key: [B, M, H, d_k].
          offsets: [Q, M, d_k], added to the keys as each query sees them (`relative.Distances`).

        Returns:
          [B, H, Q, M].
        """
        ...

    def of_few(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Of the queries of a step of decoding: [B, K, H, d_k] and [B, H, d_k, M] -> [B, H, K, M]."""
        ...


@dataclasses.dataclass(frozen=True)
class Dot:
    """q . k / sqrt(d_k), the paper's; or not `scaled`, q . k.

    Of independent features of variance 1, q . k has the variance d_k: where that is large, the softmax is next to one
    for a single key, and has next to no gradient (section 3.2.1).
    """

    scaled: bool = True

    def of_all(self, query: jax.Array, key: jax.Array, offsets: jax.Array | None = None) -> jax.Array:
        products = jnp.einsum("bqhd,bmhd->bhqm", query, key, preferred_element_type=jnp.float32)
        if offsets is not None:  # q . (k + a) = q . k + q . a, and there is no [B, Q, M, H, d_k]
            products += jnp.einsum("bqhd,qmd->bhqm", query, offsets, preferred_element_type=jnp.float32)
        return self._scale(products, query.shape[-1])

    def of_few(self, query: jax.Array, key: jax.Array) -> jax.Array:
        d_k = query.shape[-1]
        if query.shape[1] == 1:
            return self._scale(jnp.einsum("bkhd,bhdm->bhkm", query, key, preferred_element_type=jnp.float32), d_k)
        query = query.swapaxes(1, 2)[..., None].astype(jnp.float32)  # [B, H, K, d_k, 1]
        return self._scale(jnp.sum(query * key[:, :, None], axis=-2), d_k)  # with [B, H, 1, d_k, M]

    def _scale(self, products: jax.Array, d_k: int) -> jax.Array:
        return products / d_k**0.5 if self.scaled else products


@dataclasses.dataclass(frozen=True, eq=False)
class Additive:
    """v . tanh(q + k), a hidden layer of d_k (Bahdanau et al., 2015), with q = x W^Q and k = x W^K as ever.

    It holds the hidden layer of every query and key, [B, H, Q, M, d_k], where a dot product has [B, H, Q, M].
    """

    v: jax.Array  # [H, d_k]

    def of_all(self, query: jax.Array, key: jax.Array, offsets: jax.Array | None = None) -> jax.Array:
        key = key[:, None]  # [B, 1, M, H, d_k]
        if offsets is not None:
            key += offsets[:, :, None]
        hidden = jnp.tanh(query[:, :, None] + key)  # [B, Q, M, H, d_k]
        return jnp.einsum("bqmhd,hd->bhqm", hidden, self.v.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def of_few(self, query: jax.Array, key: jax.Array) -> jax.Array:
        query = query.swapaxes(1, 2)[..., None].astype(jnp.float32)  # [B, H, K, d_k, 1]
        hidden = jnp.tanh(query + key[:, :, None])  # with [B, H, 1, d_k, M]
        return jnp.sum(self.v[:, None, :, None] * hidden, axis=-2)

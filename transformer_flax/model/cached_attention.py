"""Attention for decoding step by step, with a cache of keys and values.

Letters of shapes: B batch, K hypotheses of a search, L longest output, M keys and values (the memory), H heads.
"""

import jax
import jax.numpy as jnp

from transformer_flax.model.attention import SCALED_DOT, MultiHeadAttention, masked_softmax
from transformer_flax.model.linear import product_of_few_rows
from transformer_flax.model.positions import rotate, sinusoids
from transformer_flax.model.scores import ScoreFunction


def ancestor_mask(ancestors: jax.Array, position: jax.Array, r: int = 0) -> jax.Array:
    """Returns True where hypothesis k may attend to the key that hypothesis j wrote at position l.

    ancestors int [B, K, L] -> [B, 1, K, K * L], the keys ordered by (j, l). `ancestors[b, k, l]` is the hypothesis j
    that wrote the token of hypothesis k at position l. The key must belong to a token of hypothesis k, at `position`,
    the last one written, or before. In local self-attention (section 4), it must also be at most r // 2 positions
    before. With r = 0, attention is unrestricted.
    """
    batch, hypotheses, length = ancestors.shape
    own = ancestors[:, :, None, :] == jnp.arange(hypotheses)[:, None]  # [B, K, K, L]
    past = position - jnp.arange(length)
    seen = (past >= 0) & (past <= r // 2) if r else past >= 0
    return (own & seen).reshape(batch, 1, hypotheses, -1)


def attend_to_cache(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, score: ScoreFunction = SCALED_DOT
) -> jax.Array:
    """Computes softmax(Q K^T / sqrt(d_k)) V, equation 1, for the few queries of a decoding step.

    query [B, K, H, d_k], key [B, H, d_k, M], value [B, H, M, d_v], mask broadcastable to [B, H, K, M] ->
    [B, K, H, d_v]. Attention is allowed where the mask is True.
    """
    weights = masked_softmax(score.cached(query, key), mask)
    return product_of_few_rows(weights, value).astype(value.dtype).swapaxes(1, 2)


class CachedAttention(MultiHeadAttention):
    """Multi-head attention that can also decode one position at a time.

    Keys and values are cached in two variable collections. "memory" has those of the memory (the encoder output),
    computed once (`cache_memory`, `attend_to_memory`). "cache" has those of the output tokens so far, computed step by
    step (`init_cache`, `decode_step`).
    """

    def cache_memory(self, memory: jax.Array) -> None:
        """Projects the memory [B, M, d_model] to keys and values once, for all later calls of `attend_to_memory`."""
        self.put_variable("memory", "key", self.key(memory).transpose(0, 2, 3, 1))
        self.put_variable("memory", "value", self.value(memory).swapaxes(1, 2))

    def attend_to_memory(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x [B, K, d_model] attends to the cached memory -> [B, K, d_model]."""
        key, value = self.get_variable("memory", "key"), self.get_variable("memory", "value")
        return self.output(attend_to_cache(self.query(x), key, value, mask, self.score))

    def init_cache(self, batch: int, hypotheses: int, length: int) -> None:
        """Allocates the cache: keys [B, H, d_k, K, L] and values [B, H, K, L, d_v] of all positions."""
        c = self.config
        self.put_variable("cache", "key", jnp.zeros((batch, c.num_heads, c.d_k, hypotheses, length), c.dtype))
        self.put_variable("cache", "value", jnp.zeros((batch, c.num_heads, hypotheses, length, c.d_v), c.dtype))

    def decode_step(self, x: jax.Array, position: jax.Array, mask: jax.Array) -> jax.Array:
        """x [B, K, d_model], at `position`, attends to its own past and itself -> [B, K, d_model].

        Keys and values stay where they were written. Each hypothesis attends to the keys of all K hypotheses under a
        mask [B, 1, K, K * L] of its ancestors (`ancestor_mask`). So a search that reorders hypotheses moves nothing.
        """
        query, key = self.query(x), self.key(x)
        keys, values = self.get_variable("cache", "key"), self.get_variable("cache", "value")
        hypotheses, length = keys.shape[-2:]
        if self.rotary:
            turns = jnp.asarray(sinusoids(length, self.config.d_k))[position][None]
            query, key = rotate(query, turns), rotate(key, turns)
        # `.at[].set` would be a scatter, which checks the position and may not write in place.
        keys = jax.lax.dynamic_update_index_in_dim(keys, key.transpose(0, 2, 3, 1), position, 4)
        values = jax.lax.dynamic_update_index_in_dim(values, self.value(x).swapaxes(1, 2), position, 3)
        self.put_variable("cache", "key", keys)
        self.put_variable("cache", "value", values)
        keys, values = keys.reshape(*keys.shape[:3], -1), values.reshape(*values.shape[:2], -1, values.shape[-1])
        if self.distances:  # the cache has no embeddings of distances, as they depend on the query
            keys += jnp.tile(self.distances(jnp.arange(length) - position), (hypotheses, 1)).T
        return self.output(attend_to_cache(query, keys, values, mask, self.score))

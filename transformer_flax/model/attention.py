"""Attention (section 3.2), its masks, and its memory of keys and values while decoding.

Letters of shapes: B batch, Q queries, M keys and values (the memory), H heads, K hypotheses of a search, L longest
output.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.config import EncoderConfig
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.neighbourhood import attend_nearby, neighbourhood_mask
from transformer_flax.special_tokens import PAD_ID


def padding_mask(tokens: jax.Array) -> jax.Array:
    """True where a key may be attended to: [B, M] tokens -> [B, 1, 1, M]. It masks keys; a query needs no mask."""
    return (tokens != PAD_ID)[:, None, None, :]


def causal_mask(length: int) -> jax.Array:
    """True where key position <= query position: [1, 1, length, length]."""
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


def segment_mask(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """True where query and key belong to the same of several sentences in a row.

    Args:
      query_segments: [B, Q], the number of each position's sentence in its row, counted from 1; 0 for padding.
      key_segments: [B, M].

    Returns:
      [B, 1, Q, M].
    """
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return (same & (key_segments != 0)[:, None, :])[:, None]


def ancestor_mask(ancestors: jax.Array, position: jax.Array, neighbourhood: int = 0) -> jax.Array:
    """True where hypothesis k may attend to what hypothesis j wrote at position l, being its own past or itself.

    Args:
      ancestors: int [B, K, L], the hypothesis that each one's token at each position was written by.
      position: the last one written.
      neighbourhood: r, where self-attention is restricted to so many positions; 0 for all.

    Returns:
      [B, 1, K, K * L], the keys ordered by (j, l).
    """
    batch, hypotheses, length = ancestors.shape
    own = ancestors[:, :, None, :] == jnp.arange(hypotheses)[:, None]  # [B, K, K, L]
    past = position - jnp.arange(length)
    seen = (past >= 0) & (past <= neighbourhood // 2) if neighbourhood else past >= 0
    return (own & seen).reshape(batch, 1, hypotheses, -1)


def attention_weights(query: jax.Array, key: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(Q K^T / sqrt(d_k)), the left half of equation 1, in float32.

    Args:
      query: [B, Q, H, d_k].
      key: [B, M, H, d_k].
      mask: broadcastable to [B, H, Q, M]; True where attention is allowed.

    Returns:
      [B, H, Q, M]; rows sum to 1. A row with nothing allowed is all zeros, with finite gradients.
    """
    products = jnp.einsum("bqhd,bmhd->bhqm", query, key, preferred_element_type=jnp.float32)
    return _masked_softmax(products / query.shape[-1] ** 0.5, mask)


def _masked_softmax(logits: jax.Array, mask: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(logits.dtype).min))
    return jnp.where(mask, weights, 0)


def look_up(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(Q K^T / sqrt(d_k)) V, equation 1, for the few queries of a step of decoding.

    For several queries it is written as sums of products: on a CPU a matrix product for a handful of them would first
    repack all keys and values, which takes several times as long (benchmarks/ancestors.py). One query alone makes the
    product one of a matrix and a vector, which repacks nothing and is several times as fast as the sums.

    Args:
      query: [B, K, H, d_k].
      key: [B, H, d_k, M].
      value: [B, H, M, d_v].
      mask: broadcastable to [B, H, K, M]; True where attention is allowed.

    Returns:
      [B, K, H, d_v].
    """
    d_k = query.shape[-1]
    if query.shape[1] == 1:
        products = jnp.einsum("bkhd,bhdm->bhkm", query, key, preferred_element_type=jnp.float32)
        weights = _masked_softmax(products / d_k**0.5, mask)
        return jnp.einsum("bhkm,bhmv->bkhv", weights.astype(value.dtype), value)
    query = query.swapaxes(1, 2)[..., None].astype(jnp.float32)  # [B, H, K, d_k, 1]
    products = jnp.sum(query * key[:, :, None], axis=-2)  # with [B, H, 1, d_k, M] -> [B, H, K, M]
    weights = _masked_softmax(products / d_k**0.5, mask)
    mixed = jnp.sum(weights[..., None] * value[:, :, None], axis=-2)  # with [B, H, 1, M, d_v] -> [B, H, K, d_v]
    return mixed.astype(value.dtype).swapaxes(1, 2)


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Besides the call that training uses, there are the two halves that decoding needs: attention to a memory that is
    projected once (`remember`, `recall`), and to one's own growing past (`begin`, `step`). What is kept lies in the
    variable collections "memory" (of the sentence) and "cache" (of the outputs so far). The weights of the call
    can be had by making the collection "intermediates" mutable.
    """

    config: EncoderConfig
    neighbourhood: int = 0  # r: attention to so many positions around one's own; 0: to all

    def setup(self):
        c = self.config
        project = functools.partial(
            nn.DenseGeneral,
            use_bias=c.attention_bias,
            dtype=c.dtype,
            kernel_init=nn.initializers.xavier_uniform(),
        )
        self.query = project((c.num_heads, c.d_k))
        self.key = project((c.num_heads, c.d_k))
        self.value = project((c.num_heads, c.d_v))
        self.output = project(c.d_model, axis=(-2, -1))
        self.dropout = Dropout(c.attention_dropout)

    def __call__(self, x: jax.Array, memory: jax.Array, mask: jax.Array) -> jax.Array:
        """From x [B, Q, d_model] to memory [B, M, d_model] under mask [B | 1, 1, Q | 1, M] -> [B, Q, d_model]."""
        query, key, value = self.query(x), self.key(memory), self.value(memory)
        if not self.neighbourhood:
            return self.output(self._attend(query, key, value, mask))
        if self.is_mutable_collection("intermediates"):  # whoever looks wants the weights in one piece
            return self.output(
                self._attend(query, key, value, mask & neighbourhood_mask(len(x[0]), self.neighbourhood))
            )
        return self.output(attend_nearby(self._attend, query, key, value, mask, self.neighbourhood))

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        weights = attention_weights(query, key, mask)
        self.sow("intermediates", "weights", weights)
        weights = self.dropout(weights).astype(value.dtype)
        return jnp.einsum("bhqm,bmhv->bqhv", weights, value)

    def remember(self, memory: jax.Array) -> None:
        """Projects memory [B, M, d_model] once, for every later `recall`."""
        self.put_variable("memory", "key", self.key(memory).transpose(0, 2, 3, 1))
        self.put_variable("memory", "value", self.value(memory).swapaxes(1, 2))

    def recall(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """From x [B, K, d_model] to what was remembered -> [B, K, d_model]."""
        key, value = self.get_variable("memory", "key"), self.get_variable("memory", "value")
        return self.output(look_up(self.query(x), key, value, mask))

    def begin(self, batch: int, hypotheses: int, length: int) -> None:
        """Makes room for the keys [B, H, d_k, K, L] and values [B, H, K, L, d_v] of all positions to come."""
        c = self.config
        self.put_variable("cache", "key", jnp.zeros((batch, c.num_heads, c.d_k, hypotheses, length), c.dtype))
        self.put_variable("cache", "value", jnp.zeros((batch, c.num_heads, hypotheses, length, c.d_v), c.dtype))

    def step(self, x: jax.Array, position: jax.Array, mask: jax.Array) -> jax.Array:
        """From x [B, K, d_model], which stands at `position`, to its own past and itself -> [B, K, d_model].

        Keys and values stay where they were written: each hypothesis attends to those of all K under a mask
        [B, 1, K, K * L] of its ancestors (`ancestor_mask`), so that none is moved when hypotheses are exchanged.
        """
        key = self.get_variable("cache", "key").at[..., position].set(self.key(x).transpose(0, 2, 3, 1))
        value = self.get_variable("cache", "value").at[..., position, :].set(self.value(x).swapaxes(1, 2))
        self.put_variable("cache", "key", key)
        self.put_variable("cache", "value", value)
        key, value = key.reshape(*key.shape[:3], -1), value.reshape(*value.shape[:2], -1, value.shape[-1])
        return self.output(look_up(self.query(x), key, value, mask))

"""Attention (section 3.2), its masks, and its memory of keys and values while decoding.

Letters of shapes: B batch, Q queries, M keys and values (the memory), H heads, K hypotheses of a search, L longest
output.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.dropout import Dropout
from transformer_flax.special_tokens import PAD_ID


def padding_mask(tokens: jax.Array) -> jax.Array:
    """True where a key may be attended to: [B, M] tokens -> [B, 1, 1, M]. It masks keys; a query needs no mask."""
    return (tokens != PAD_ID)[:, None, None, :]


def causal_mask(length: int) -> jax.Array:
    """True where key position <= query position: [1, 1, length, length]."""
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


def attention_weights(query: jax.Array, key: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(Q K^T / sqrt(d_k)), the left half of equation 1, in float32.

    Args:
      query: [B, Q, H, d_k].
      key: [B, M, H, d_k].
      mask: broadcastable to [B, H, Q, M]; True where attention is allowed.

    Returns:
      [B, H, Q, M]; rows sum to 1. A row with nothing allowed is all zeros, with finite gradients.
    """
    logits = jnp.einsum("bqhd,bmhd->bhqm", query, key, preferred_element_type=jnp.float32) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(logits.dtype).min))
    return jnp.where(mask, weights, 0)


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Besides the call that training uses, there are the two halves that decoding needs: attention to a memory that is
    projected once (`remember`, `recall`), and to one's own growing past (`begin`, `step`). What is kept lies in the
    variable collections "memory" (one per sentence) and "cache" (one per hypothesis).
    The weights can be had by making the collection "intermediates" mutable.
    """

    config: TransformerConfig

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
        return self._attend(self.query(x), self.key(memory), self.value(memory), mask)

    def _attend(self, query, key, value, mask):
        weights = attention_weights(query, key, mask)
        self.sow("intermediates", "weights", weights)
        weights = self.dropout(weights).astype(value.dtype)
        return self.output(jnp.einsum("bhqm,bmhv->bqhv", weights, value))

    def remember(self, memory: jax.Array) -> None:
        """Projects memory [B, M, d_model] once, for every later `recall`."""
        self.put_variable("memory", "key", self.key(memory))
        self.put_variable("memory", "value", self.value(memory))

    def recall(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """From x [B, K, d_model] to what was remembered -> [B, K, d_model]."""
        return self._attend(
            self.query(x), self.get_variable("memory", "key"), self.get_variable("memory", "value"), mask
        )

    def begin(self, batch: int, hypotheses: int, length: int) -> None:
        """Makes room for the keys and values of `length` positions of every hypothesis."""
        c = self.config
        for name, depth in (("key", c.d_k), ("value", c.d_v)):
            self.put_variable("cache", name, jnp.zeros((batch, hypotheses, length, c.num_heads, depth), c.dtype))

    def step(self, x: jax.Array, position: jax.Array) -> jax.Array:
        """From x [B, K, d_model], which stands at `position`, to its own past and itself -> [B, K, d_model]."""

        def extend(name, new):  # [B, K, H, d] into [B, K, L, H, d]
            cached = self.get_variable("cache", name).at[:, :, position].set(new)
            self.put_variable("cache", name, cached)
            return cached.reshape(-1, *cached.shape[2:])

        key, value = extend("key", self.key(x)), extend("value", self.value(x))
        query = self.query(x).reshape(-1, 1, *key.shape[2:])
        mask = (jnp.arange(key.shape[1]) <= position)[None, None, None, :]
        return self._attend(query, key, value, mask).reshape(x.shape)

"""Attention (section 3.2) and its masks, for whole sentences and for decoding step by step.

Letters of shapes: B batch, Q queries, M keys and values (the memory), H heads; K hypotheses of a search, L longest
output. [B | 1, Q] stands for [B, Q] or [1, Q].
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.config import LayerConfig
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.linear import Dense, product_of_few_rows, xavier
from transformer_flax.model.local_attention import attend_locally, local_mask
from transformer_flax.model.positions import Distances, distances_between, rotate, sinusoids
from transformer_flax.model.scores import Additive, Dot, ScoreFunction
from transformer_flax.special_tokens import PAD_ID

SCALED_DOT = Dot()  # the paper's score


def padding_mask(tokens: jax.Array) -> jax.Array:
    """Returns True where a key is not padding: tokens [B, M] -> [B, 1, 1, M]. Only keys are masked, not queries."""
    return (tokens != PAD_ID)[:, None, None, :]


def causal_mask(length: int) -> jax.Array:
    """Returns True where key position <= query position (section 3.2.3): [1, 1, length, length]."""
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


def segment_mask(query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """Returns True where the query and the key belong to the same sentence: [B, Q], [B, M] -> [B, 1, Q, M].

    A row may hold several sentences. Segments give the number of each position's sentence, from 1; 0 is padding.
    """
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return (same & (key_segments != 0)[:, None, :])[:, None]


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


def attention_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array,
    score: ScoreFunction = SCALED_DOT,
    offsets: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(Q K^T / sqrt(d_k)), the left half of equation 1, in float32; or the softmax of another score.

    query [B, Q, H, d_k], key [B, M, H, d_k], mask broadcastable to [B, H, Q, M] -> [B, H, Q, M]. Attention is allowed
    where the mask is True. Each row sums to 1, but a row in which no key is allowed is all zeros, with finite
    gradients. `scores.Dot` computes the score, and divides it by sqrt(d_k). With `offsets` [Q, M, d_k], `offsets[q, m]`
    is added to key m for query q.
    """
    return masked_softmax(score.full(query, key, offsets), mask)


def masked_softmax(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes the softmax over the keys where the mask is True. All other weights are zero."""
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(logits.dtype).min))
    return jnp.where(mask, weights, 0)


class MultiHeadAttention(nn.Module):
    """Multi-head attention (section 3.2.2).

        MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O
        head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)

    `__call__` computes whole sentences. If the collection "intermediates" is mutable, it stores the attention weights
    there. The other methods decode one position at a time. Keys and values are then cached in two collections. "memory"
    has those of the memory (the encoder output), computed once (`cache_memory`, `attend_to_memory`). "cache" has those
    of the output tokens so far, computed step by step (`init_cache`, `decode_step`).
    """

    config: LayerConfig
    to_itself: bool = False  # self-attention; only self-attention can be local, or have relative or rotary positions

    def setup(self):
        c = self.config
        project = functools.partial(Dense, use_bias=c.attention_bias, dtype=c.dtype)
        # fairseq's W^Q, W^K and W^V have the scale of one matrix [d_model, 3 d_model].
        gain = 0.5**0.5 if c.start == "fairseq" else 1.0
        self.query = project((c.num_heads, c.d_k), kernel_init=xavier(gain))  # all W_i^Q: [d_model, H, d_k]
        self.key = project((c.num_heads, c.d_k), kernel_init=xavier(gain))
        self.value = project((c.num_heads, c.d_v), kernel_init=xavier(gain * c.branch_init))
        # W^O [H, d_v, d_model]. The product sums over H and d_v, as if the heads were concatenated.
        self.output = project(c.d_model, axis=(-2, -1), kernel_init=xavier(c.branch_init))
        self.dropout = Dropout(c.attention_dropout)
        if c.compatibility == "additive":
            self.score = Additive(self.param("v", nn.initializers.normal(c.d_k**-0.5), (c.num_heads, c.d_k)))
        else:
            self.score = Dot(scaled=c.compatibility == "scaled_dot")
        self.r = c.neighbourhood if self.to_itself else 0  # of section 4; 0: unrestricted
        self.rotary = self.to_itself and c.positions == "rotary"
        self.distances = Distances(c) if self.to_itself and c.positions == "relative" else None

    def __call__(self, x: jax.Array, memory: jax.Array, mask: jax.Array) -> jax.Array:
        """x [B, Q, d_model] attends to memory [B, M, d_model] under mask [B | 1, 1, Q | 1, M] -> [B, Q, d_model].

        In self-attention, the memory is x itself.
        """
        query, key, value = self.query(x), self.key(memory), self.value(memory)  # of all heads
        if self.rotary:
            turns = jnp.asarray(sinusoids(x.shape[1], self.config.d_k))
            query, key = rotate(query, turns), rotate(key, turns)
        if not self.r:
            heads = self._attend(query, key, value, mask)
        elif self.is_mutable_collection("intermediates"):  # stores the weights as one matrix [Q, M], not in blocks
            heads = self._attend(query, key, value, mask & local_mask(x.shape[1], self.r))
        else:
            heads = attend_locally(self._attend, query, key, value, mask, self.r)
        return self.output(heads)  # Concat(head_1, ..., head_h) W^O

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        """Computes Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V (equation 1) of each head, for whole sentences.

        query [B, Q, H, d_k], key [B, M, H, d_k], value [B, M, H, d_v], mask [B | 1, 1, Q | 1, M] -> [B, Q, H, d_v].
        """
        if self.config.attention_implementation == "cudnn" and not self.is_mutable_collection("intermediates"):
            return attend_fused(query, key, value, mask, scaled=self.config.compatibility == "scaled_dot")
        offsets = self.distances(distances_between(query.shape[1], key.shape[1])) if self.distances else None
        weights = attention_weights(query, key, mask, self.score, offsets)  # softmax(Q K^T / sqrt(d_k))
        self.sow("intermediates", "weights", weights)
        weights = self.dropout(weights).astype(value.dtype)
        return jnp.einsum("bhqm,bmhv->bqhv", weights, value)  # times V

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


def attend_to_cache(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, score: ScoreFunction = SCALED_DOT
) -> jax.Array:
    """Computes softmax(Q K^T / sqrt(d_k)) V, equation 1, for the few queries of a decoding step.

    query [B, K, H, d_k], key [B, H, d_k, M], value [B, H, M, d_v], mask broadcastable to [B, H, K, M] ->
    [B, K, H, d_v]. Attention is allowed where the mask is True.
    """
    weights = masked_softmax(score.cached(query, key), mask)
    return product_of_few_rows(weights, value).astype(value.dtype).swapaxes(1, 2)


def has_cudnn(d_k: int) -> bool:
    """Returns whether the device runs cuDNN's attention: NVIDIA's from the A100 on, for d_k > 128 from the H100 on."""
    capability = getattr(jax.devices()[0], "compute_capability", "")  # "8.0" on an NVIDIA GPU, "gfx90a" on an AMD GPU
    return capability[:1].isdigit() and float(capability) >= (8 if d_k <= 128 else 9)


def attend_fused(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, *, scaled: bool = True
) -> jax.Array:
    """Computes softmax(Q K^T / sqrt(d_k)) V, equation 1, by one kernel of cuDNN, which writes no attention weights.

    query [B, Q, H, d_k], key [B, M, H, d_k], value [B, M, H, d_k], mask [B | 1, 1, Q | 1, M] -> [B, Q, H, d_k].
    Attention is allowed where the mask is True. A row in which no key is allowed attends to all keys equally. Without
    `scaled`, Q K^T is not divided by sqrt(d_k).

    On devices without cuDNN, XLA computes the same, so a model that was trained on a GPU can be used on any device.
    """
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=jnp.broadcast_to(mask, (*mask.shape[:2], query.shape[1], key.shape[1])),
        scale=None if scaled else 1.0,
        implementation="cudnn" if has_cudnn(query.shape[-1]) else "xla",
    )

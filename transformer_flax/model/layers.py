"""The parts of the paper's figure 1: embeddings, Add & Norm, feed-forward, and the layers of encoder and decoder.

Letters of shapes: B batch, S source positions, T target positions, V vocabulary.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.attention import MultiHeadAttention
from transformer_flax.model.config import LayerConfig, ModelConfig
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.linear import Dense, product, wide_einsum, xavier

LAYER_NORM_EPSILON = 1e-6

Sublayer = Callable[[jax.Array], jax.Array]  # [..., d_model] -> [..., d_model]


class Embedding(nn.Module):
    """Embeddings of tokens, times sqrt(d_model) (section 3.4): [...] -> float32 [..., d_model].

    Before training, their entries have the standard deviation `deviation`.

    They are float32, whatever type the model computes in: the gradient of a frequent word's vector is a sum over many
    tokens.
    """

    config: ModelConfig
    deviation: float = 1.0

    def setup(self):
        c = self.config
        init = nn.initializers.normal(self.deviation * c.d_model**-0.5)
        self.embedding = self.param("embedding", init, (c.vocab_size, c.d_model))  # E [V, d_model]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.embedding, tokens, axis=0) * self.config.d_model**0.5


def embeddings(config: ModelConfig, *, tied: bool, deviation: float = 1.0) -> tuple[Embedding, Embedding, Embedding]:
    """Returns the source embedding, the target embedding and the embedding whose matrix gives the logits.

    If `tied`, all three are the same (section 3.4). `deviation` is that of the two input embeddings; a separate output
    embedding has 1.
    """
    if tied:
        return (Embedding(config, deviation, name="embedding"),) * 3
    source, target = (Embedding(config, deviation, name=f"{side}_embedding") for side in ("source", "target"))
    return source, target, Embedding(config, name="output_embedding")


def to_logits(y: jax.Array, embedding: jax.Array) -> jax.Array:
    """Computes the logits y E^T before the softmax (section 3.4): [..., d_model], [V, d_model] -> float32 [..., V]."""
    if y.dtype == jnp.float32:  # on a CPU, the gradient of `product` needs less time and memory
        last_with_first = (((y.ndim - 1,), (0,)), ((), ()))  # the axes of y and of E^T to sum over
        return product(y, embedding.T, last_with_first)
    return wide_einsum("...d,vd->...v", y, embedding.astype(y.dtype))


def layer_norm(config: LayerConfig, name: str) -> nn.LayerNorm:
    # The fast variance, E[x^2] - E[x]^2, loses digits to cancellation if the mean is large and the variance small.
    return nn.LayerNorm(epsilon=LAYER_NORM_EPSILON, dtype=config.dtype, use_fast_variance=False, name=name)


class AddAndNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))), the paper's residual connection (sections 3.1 and 5.4)."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: jax.Array, sublayer: Sublayer) -> jax.Array:
        norm, dropout = layer_norm(self.config, "norm"), Dropout(self.config.dropout)
        return norm(x + dropout(sublayer(x)))


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, equation 2 (section 3.3): [..., d_model] -> [..., d_model]."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        dense = functools.partial(Dense, dtype=c.dtype, kernel_init=xavier(c.branch_init))
        hidden = nn.relu(dense(c.d_ff, name="w_1")(x))
        return dense(c.d_model, name="w_2")(Dropout(c.ffn_dropout)(hidden))


class EncoderLayer(nn.Module):
    """A layer of the encoder (section 3.1; figure 1, left): self-attention, then feed-forward."""

    config: LayerConfig
    residual: Callable[[LayerConfig], nn.Module]  # `AddAndNorm`, unless `choose_start` has another

    def setup(self):
        self.self_attention = MultiHeadAttention(self.config, to_itself=True)
        self.feed_forward = FeedForward(self.config)
        self.after_self_attention = self.residual(self.config)
        self.after_feed_forward = self.residual(self.config)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x [B, S, d_model], mask [B, 1, S | 1, S] -> [B, S, d_model]."""
        x = self.after_self_attention(x, lambda x: self.self_attention(x, x, mask))
        return self.after_feed_forward(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """A layer of the decoder (section 3.1; figure 1, right).

    It consists of masked self-attention, attention to the memory (the encoder output), and feed-forward.
    """

    config: LayerConfig
    residual: Callable[[LayerConfig], nn.Module]  # `AddAndNorm`, unless `choose_start` has another

    def setup(self):
        self.self_attention = MultiHeadAttention(self.config, to_itself=True)
        self.cross_attention = MultiHeadAttention(self.config)
        self.feed_forward = FeedForward(self.config)
        self.after_self_attention = self.residual(self.config)
        self.after_cross_attention = self.residual(self.config)
        self.after_feed_forward = self.residual(self.config)

    def __call__(self, y: jax.Array, mask: jax.Array, memory: jax.Array, memory_mask: jax.Array) -> jax.Array:
        """y [B, T, d_model], its mask [B | 1, 1, T, T], memory [B, S, d_model] and its mask -> [B, T, d_model]."""
        y = self.after_self_attention(y, lambda y: self.self_attention(y, y, mask))
        y = self.after_cross_attention(y, lambda y: self.cross_attention(y, memory, memory_mask))
        return self.after_feed_forward(y, self.feed_forward)

    def init_cache(self, memory: jax.Array, hypotheses: int, length: int) -> None:
        self.cross_attention.cache_memory(memory)
        self.self_attention.init_cache(memory.shape[0], hypotheses, length)

    def decode_step(self, y: jax.Array, position: jax.Array, mask: jax.Array, memory_mask: jax.Array) -> jax.Array:
        y = self.after_self_attention(y, lambda y: self.self_attention.decode_step(y, position, mask))
        y = self.after_cross_attention(y, lambda y: self.cross_attention.attend_to_memory(y, memory_mask))
        return self.after_feed_forward(y, self.feed_forward)

"""A convolutional translator, after ConvS2S (Gehring et al., 2017; the paper's section 2 and table 2).

Encoder and decoder are stacks of gated convolutions. The decoder's are causal, and each of its layers has attention.
Differences from ConvS2S: all layers have one width, and weights are not normalised. Embeddings start as large as the
Transformer's, so attention is scaled. The encoder's gradients are not scaled down, because Adam would undo that.

Letters of shapes: B batch, S source positions, T target positions, K hypotheses of a search, L longest output,
V vocabulary.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.checked_fields import size
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.layers import to_logits
from transformer_flax.model.linear import Conv, Dense
from transformer_flax.model.positions import Positions
from transformer_flax.model.registry import Kind, register
from transformer_flax.model.scores import Dot
from transformer_flax.model.transformer import shift_right
from transformer_flax.relatives.seq2seq import Memory, Seq2Seq, Seq2SeqConfig, one_head_weights
from transformer_flax.special_tokens import PAD_ID

SQRT_HALF = 0.5**0.5  # a sum of two terms, times this, has the variance of one


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionalConfig(Seq2SeqConfig):
    """The fields of a convolutional translator. `configs/convolutional.py` explains each field."""

    positions: ClassVar[str] = "learned"
    kernel_width: int = size()  # k
    max_length: int = size()

    def __post_init__(self):
        super().__post_init__()
        self.require("kernel_width", self.kernel_width % 2 == 1, "odd: the encoder sees as many words before as after")


class GatedConvolution(nn.Module):
    """a * sigmoid(b), where [a; b], of width 2 d_model, is a convolution of the input (Dauphin et al., 2017)."""

    config: ConvolutionalConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., k - 1 + T, d_model] -> [..., T, d_model]."""
        c = self.config
        # A gate of about 1/2 divides the variance by 4. Dropout has raised the variance of the input.
        kernel_init = nn.initializers.variance_scaling(4 * (1 - c.dropout), "fan_in", "normal")
        conv = Conv(2 * c.d_model, c.kernel_width, padding="VALID", dtype=c.dtype, kernel_init=kernel_init, name="conv")
        return nn.glu(conv(Dropout(c.dropout)(x)))


class EncoderConvolution(nn.Module):
    """An encoder layer: (x + GatedConvolution(x)) sqrt(0.5), with as many positions before as after."""

    config: ConvolutionalConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x [B, S, d_model] under mask [B, S, 1] -> [B, S, d_model]."""
        beside = self.config.kernel_width // 2
        # Padding must look like the zeros beyond the sentence.
        padded = jnp.pad(jnp.where(mask, x, 0), ((0, 0), (beside, beside), (0, 0)))
        return (x + GatedConvolution(self.config, name="convolution")(padded)) * SQRT_HALF


class DecoderConvolution(nn.Module):
    """A decoder layer: a causal gated convolution, attention to the memory, and the input, each added in turn."""

    config: ConvolutionalConfig

    def setup(self):
        self.convolution = GatedConvolution(self.config)
        self.query = _dense(self.config)
        self.output = _dense(self.config)

    def __call__(self, y: jax.Array, embedded: jax.Array, memory: Memory) -> jax.Array:
        """y [B, T, d_model] and the decoder's input, `embedded` -> [B, T, d_model]."""
        h = self.convolution(jnp.pad(y, ((0, 0), (self.config.kernel_width - 1, 0), (0, 0))))
        return self._attend(h, y, embedded, memory)

    def init_cache(self, batch: int, hypotheses: int) -> None:
        """Allocates the cache of the last k - 1 inputs: [B, K, k - 1, d_model]."""
        c = self.config
        self.put_variable("cache", "inputs", jnp.zeros((batch, hypotheses, c.kernel_width - 1, c.d_model), c.dtype))

    def decode_step(self, y: jax.Array, embedded: jax.Array, memory: Memory, parents: jax.Array) -> jax.Array:
        """Does what `__call__` does for one position: y [B, K, d_model]; hypotheses continue `parents` [B, K]."""
        before = jnp.take_along_axis(self.get_variable("cache", "inputs"), parents[:, :, None, None], axis=1)
        window = jnp.concatenate([before, y[:, :, None]], axis=2)
        self.put_variable("cache", "inputs", window[:, :, 1:])
        return self._attend(self.convolution(window)[:, :, 0], y, embedded, memory)

    def _attend(self, h: jax.Array, y: jax.Array, embedded: jax.Array, memory: Memory) -> jax.Array:
        query = (self.query(h) + embedded) * SQRT_HALF
        # ConvS2S does not scale the score, but its embeddings start ten times smaller. Without the scale, the softmax
        # would start with ones and zeros, and the factor sqrt(S) below would make the contexts much too long.
        weights = one_head_weights(self, query, memory, Dot(scaled=True))
        # A mean of S vectors has 1/S of the variance of one vector.
        weights *= jnp.sum(memory.mask, axis=-1, keepdims=True) ** 0.5
        context = jnp.einsum("bts,bsd->btd", weights.astype(y.dtype), memory.values)
        h = (h + self.output(context)) * SQRT_HALF
        return (y + h) * SQRT_HALF


class ConvolutionalTranslator(Seq2Seq):
    """A translator of N gated convolutions on each side (the paper's section 2 and table 2)."""

    config: ConvolutionalConfig  # pyrefly: ignore (which is never set anew)

    def setup(self):
        super().setup()
        c = self.config
        self.positions = Positions(c)
        self.encoder = [EncoderConvolution(c) for _ in range(c.num_layers)]
        self.decoder = [DecoderConvolution(c) for _ in range(c.num_layers)]
        self.output = _dense(c)
        self.dropout = Dropout(c.dropout)

    def features(self, source: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        memory = self.encode(source)
        y = embedded = self._embed(self.target_embedding, shift_right(target), self.positions(target.shape[1]))
        for layer in self.decoder:
            y = layer(y, embedded, memory)
        return self._features(y)

    def encode(self, source: jax.Array) -> Memory:
        """Encodes source [B, S] into a memory.

        The keys are the encoder's output z. The values are (z + e) sqrt(0.5), with the embeddings e.
        """
        mask = source != PAD_ID
        x = embedded = self._embed(self.source_embedding, source, self.positions(source.shape[1]))
        for layer in self.encoder:
            x = layer(x, mask[..., None])
        return Memory(x, (x + embedded) * SQRT_HALF, mask[:, None])

    def init_cache(self, source: jax.Array, hypotheses: int, length: int) -> None:
        """Does the same as `Transformer.init_cache`."""
        self.positions(length)  # raises an error if fewer positions were learned
        self.put_variable("memory", "memory", self.encode(source))
        for layer in self.decoder:
            layer.init_cache(len(source), hypotheses)

    def decode_step(self, tokens: jax.Array, parents: jax.Array, position: jax.Array) -> jax.Array:
        """Does the same as `Transformer.decode_step`."""
        memory = self.get_variable("memory", "memory")
        here = jnp.take(self.positions(self.config.max_length), position, axis=0)
        y = embedded = self._embed(self.target_embedding, tokens, here)
        for layer in self.decoder:
            y = layer.decode_step(y, embedded, memory, parents)
        return to_logits(*self._features(y))

    def _features(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.output(self.dropout(y)), self.output_embedding.embedding


def _dense(config: ConvolutionalConfig) -> Dense:
    return Dense(config.d_model, dtype=config.dtype, kernel_init=nn.initializers.lecun_normal())


register("convolutional", Kind(ConvolutionalConfig, ConvolutionalTranslator, attention={"cross": "decoder_*"}))

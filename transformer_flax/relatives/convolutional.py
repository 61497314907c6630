"""A convolutional translator, as ConvS2S (Gehring et al., 2017), of the paper's section 2 and table 2.

Gated convolutions on both sides, causal in the decoder, and attention in each of its layers. It departs from ConvS2S in
that everything is of one width, embeddings start as large as the Transformer's (and attention is scaled), weights are
not normalised, and the gradients of the encoder are not scaled down, which would be next to nothing to Adam.

Letters of shapes: B batch, S source positions, T target positions, K hypotheses of a search, L longest output,
V vocabulary.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.attention import attention_weights
from transformer_flax.model.config import require, require_size
from transformer_flax.model.dense import Conv, Dense
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.positions import Positions
from transformer_flax.model.scores import Dot
from transformer_flax.model.transformer import embed, shift_right, to_logits
from transformer_flax.relatives.seq2seq import Embedded, EmbeddedConfig
from transformer_flax.special_tokens import PAD_ID

HALVED = 0.5**0.5  # what keeps the variance of a sum of two as it was


@dataclasses.dataclass(frozen=True)
class ConvolutionalConfig(EmbeddedConfig):
    """Sizes and choices of a convolutional translator; `configs/convolutional.py` explains each."""

    positions: ClassVar[str] = "learned"
    kernel_width: int  # k
    max_length: int

    def __post_init__(self):
        super().__post_init__()
        require_size(self, "kernel_width")
        require(self, "kernel_width", lambda v: v % 2 == 1, "odd: the encoder sees as many words before as behind")
        require_size(self, "max_length")


class Memory(NamedTuple):
    """What the decoder looks up of the source."""

    keys: jax.Array  # [B, S, d_model], the encoder's output z
    values: jax.Array  # [B, S, d_model], z with the embeddings e, so that a word's own meaning is at hand
    mask: jax.Array  # bool [B, 1, S], False at padding


class GatedConvolution(nn.Module):
    """a * sigmoid(b), where [a; b], of twice d_model, is a convolution of the input (Dauphin et al., 2017)."""

    config: ConvolutionalConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., k - 1 + T, d_model] -> [..., T, d_model]: the input has k - 1 positions more, wherever they stand."""
        c = self.config
        # Gates, being about a half, quarter the variance; dropout has raised that of the input.
        kernel_init = nn.initializers.variance_scaling(4 * (1 - c.dropout), "fan_in", "normal")
        conv = Conv(2 * c.d_model, c.kernel_width, padding="VALID", dtype=c.dtype, kernel_init=kernel_init, name="conv")
        return nn.glu(conv(Dropout(c.dropout)(x)))


class EncoderLayer(nn.Module):
    """(x + GatedConvolution(x)) sqrt(0.5), with as many positions before as behind."""

    config: ConvolutionalConfig

    def setup(self):
        self.convolution = GatedConvolution(self.config)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x [B, S, d_model] under mask [B, S, 1] -> [B, S, d_model]."""
        beside = self.config.kernel_width // 2
        # Padding must look like what is beyond the sentence.
        padded = jnp.pad(jnp.where(mask, x, 0), ((0, 0), (beside, beside), (0, 0)))
        return (x + self.convolution(padded)) * HALVED


class DecoderLayer(nn.Module):
    """A gated convolution of what came before, attention to the encoder's output, and the input, each added in turn."""

    config: ConvolutionalConfig

    def setup(self):
        self.convolution = GatedConvolution(self.config)
        self.query = _dense(self.config)
        self.output = _dense(self.config)

    def __call__(self, y: jax.Array, embedded: jax.Array, memory: Memory) -> jax.Array:
        """y [B, T, d_model] and the embeddings that the stack began with -> [B, T, d_model]."""
        h = self.convolution(jnp.pad(y, ((0, 0), (self.config.kernel_width - 1, 0), (0, 0))))
        return self._attend(h, y, embedded, memory)

    def begin(self, batch: int, hypotheses: int) -> None:
        """Makes room for the last inputs that a step's window has besides its own: [B, K, k - 1, d_model]."""
        c = self.config
        self.put_variable("cache", "inputs", jnp.zeros((batch, hypotheses, c.kernel_width - 1, c.d_model), c.dtype))

    def step(self, y: jax.Array, embedded: jax.Array, memory: Memory, parents: jax.Array) -> jax.Array:
        """The same for one more position [B, K, d_model] of hypotheses that go on from those of parents [B, K]."""
        before = jnp.take_along_axis(self.get_variable("cache", "inputs"), parents[:, :, None, None], axis=1)
        window = jnp.concatenate([before, y[:, :, None]], axis=2)
        self.put_variable("cache", "inputs", window[:, :, 1:])
        return self._attend(self.convolution(window)[:, :, 0], y, embedded, memory)

    def _attend(self, h: jax.Array, y: jax.Array, embedded: jax.Array, memory: Memory) -> jax.Array:
        query = (self.query(h) + embedded) * HALVED
        one_head = query[:, :, None], memory.keys[:, :, None], memory.mask[:, None]
        # ConvS2S does not scale. Its embeddings start ten times smaller, though: here, softmax would begin with ones
        # and zeros, and the scaling by sqrt(S) below would make contexts much too long.
        weights = attention_weights(*one_head, Dot(scaled=True))[:, 0]
        self.sow("intermediates", "weights", weights)
        # A mean of S vectors has an S-th of their variance: S sqrt(1/S) scales it up again.
        weights *= jnp.sum(memory.mask, axis=-1, keepdims=True) ** 0.5
        context = jnp.einsum("bts,bsd->btd", weights.astype(y.dtype), memory.values)
        h = (h + self.output(context)) * HALVED
        return (y + h) * HALVED


class ConvolutionalTranslator(Embedded):
    """The whole model: token ids in, next-token logits out. Dropout is active when a "dropout" key is given."""

    config: ConvolutionalConfig  # pyrefly: ignore (which is never set anew)

    def setup(self):
        super().setup()
        c = self.config
        self.positions = Positions(c)
        self.encoder = [EncoderLayer(c) for _ in range(c.num_layers)]
        self.decoder = [DecoderLayer(c) for _ in range(c.num_layers)]
        self.output = _dense(c)
        self.dropout = Dropout(c.dropout)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """source [B, S], target [B, T] -> logits [B, T, V] in float32; those at t see the target before t only."""
        return to_logits(*self.features(source, target))

    def features(self, source: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the logits are the product of: the decoder's output [B, T, d_model] and the embedding [V, d_model]."""
        memory = self.encode(source)
        y = embedded = self._embed(self.target_embedding, shift_right(target), self.positions(target.shape[1]))
        for layer in self.decoder:
            y = layer(y, embedded, memory)
        return self._features(y)

    def encode(self, source: jax.Array) -> Memory:
        """source [B, S] -> its memory."""
        mask = source != PAD_ID
        x = embedded = self._embed(self.source_embedding, source, self.positions(source.shape[1]))
        for layer in self.encoder:
            x = layer(x, mask[..., None])
        return Memory(x, (x + embedded) * HALVED, mask[:, None])

    def begin(self, source: jax.Array, hypotheses: int, length: int) -> None:
        """Encodes source [B, S] and makes room for K hypotheses of at most L tokens for each sentence.

        Fills the collections "memory" (of the sentence) and "cache" (of the outputs so far), each with B in front.
        """
        self.positions(length)  # refuses more than there are
        self.put_variable("memory", "memory", self.encode(source))
        for layer in self.decoder:
            layer.begin(len(source), hypotheses)

    def step(self, tokens: jax.Array, parents: jax.Array, position: jax.Array) -> jax.Array:
        """One more token for each hypothesis -> the logits [B, K, V] of the next.

        Args:
          tokens: [B, K], at `position`.
          parents: [B, K], the hypotheses of the step before that these continue.
          position: counts from 0, the begin symbol's.
        """
        memory = self.get_variable("memory", "memory")
        here = jnp.take(self.positions(self.config.max_length), position, axis=0)
        y = embedded = self._embed(self.target_embedding, tokens, here)
        for layer in self.decoder:
            y = layer.step(y, embedded, memory, parents)
        return to_logits(*self._features(y))

    def _embed(self, embedding: nn.Embed, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return self.embedding_dropout((embed(embedding, tokens) + positions).astype(self.config.dtype))

    def _features(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.output(self.dropout(y)), self.output_embedding.embedding


def _dense(config: ConvolutionalConfig) -> Dense:
    return Dense(config.d_model, dtype=config.dtype, kernel_init=nn.initializers.lecun_normal())


def attention_maps(
    config: ConvolutionalConfig, params: Any, source: jax.Array, target: jax.Array
) -> dict[str, jax.Array]:
    """The attention weights of one teacher-forced pass over source [B, S] and target [B, T], in float32.

    Returns:
      {"cross": [N, B, 1, T, S]}, layer by layer.
    """
    _, sown = ConvolutionalTranslator(config).apply({"params": params}, source, target, mutable=["intermediates"])
    weights: Any = sown["intermediates"]
    layers = [weights[f"decoder_{n}"]["weights"][0] for n in range(config.num_layers)]
    return {"cross": jnp.stack(layers)[:, :, None]}

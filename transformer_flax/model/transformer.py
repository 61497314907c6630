"""The Transformer (section 3), to be read beside the paper's figure 1.

Letters of shapes: B batch, S source positions, T target positions, K hypotheses of a search, L longest output,
V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.attention import MultiHeadAttention, ancestor_mask, causal_mask, padding_mask, segment_mask
from transformer_flax.model.config import EncoderConfig, TransformerConfig
from transformer_flax.model.dense import Dense, xavier
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.positions import Positions, positions_in_segments
from transformer_flax.special_tokens import BEGIN_ID

LAYER_NORM_EPSILON = 1e-6


def shift_right(target: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """The decoder's input [B, T]: the target one position later, behind the begin symbol (section 3.1).

    With `segments`, each of the sentences in a row for itself.
    """
    shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN_ID)
    return shifted if segments is None else jnp.where(positions_in_segments(segments) == 0, BEGIN_ID, shifted)


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, equation 2."""

    config: EncoderConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        dense = functools.partial(Dense, dtype=c.dtype, kernel_init=xavier(c.branch_init))
        hidden = Dropout(c.ffn_dropout)(nn.relu(dense(c.d_ff, name="w_1")(x)))
        return dense(c.d_model, name="w_2")(hidden)


def layer_norm(config: EncoderConfig, **kwargs) -> nn.LayerNorm:
    # The plain variance: the fast one, E[x^2] - E[x]^2, cancels where activations are large beside their spread.
    return nn.LayerNorm(epsilon=LAYER_NORM_EPSILON, dtype=config.dtype, use_fast_variance=False, **kwargs)


class AddAndNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))), the residual connection around every sub-layer (sections 3.1 and 5.4).

    With `pre_norm`, x + Dropout(Sublayer(LayerNorm(x))), as in the authors' later code.
    """

    config: EncoderConfig

    @nn.compact
    def __call__(self, x: jax.Array, sublayer) -> jax.Array:
        norm = layer_norm(self.config, name="norm")
        dropout = Dropout(self.config.dropout)
        if self.config.pre_norm:
            return x + dropout(sublayer(norm(x)))
        return norm(x + dropout(sublayer(x)))


class EncoderLayer(nn.Module):
    """Figure 1, left: self-attention, then feed-forward."""

    config: EncoderConfig

    def setup(self):
        self.self_attention = MultiHeadAttention(self.config, to_itself=True)
        self.feed_forward = FeedForward(self.config)
        self.after_self_attention = AddAndNorm(self.config)
        self.after_feed_forward = AddAndNorm(self.config)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.after_self_attention(x, lambda x: self.self_attention(x, x, mask))
        return self.after_feed_forward(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Figure 1, right: masked self-attention, attention to the encoder's output, feed-forward."""

    config: TransformerConfig

    def setup(self):
        self.self_attention = MultiHeadAttention(self.config, to_itself=True)
        self.cross_attention = MultiHeadAttention(self.config)
        self.feed_forward = FeedForward(self.config)
        self.after_self_attention = AddAndNorm(self.config)
        self.after_cross_attention = AddAndNorm(self.config)
        self.after_feed_forward = AddAndNorm(self.config)

    def __call__(self, y: jax.Array, mask: jax.Array, memory: jax.Array, memory_mask: jax.Array) -> jax.Array:
        y = self.after_self_attention(y, lambda y: self.self_attention(y, y, mask))
        y = self.after_cross_attention(y, lambda y: self.cross_attention(y, memory, memory_mask))
        return self.after_feed_forward(y, self.feed_forward)

    def begin(self, memory: jax.Array, hypotheses: int, length: int) -> None:
        self.cross_attention.remember(memory)
        self.self_attention.begin(memory.shape[0], hypotheses, length)

    def step(self, y: jax.Array, position: jax.Array, mask: jax.Array, memory_mask: jax.Array) -> jax.Array:
        y = self.after_self_attention(y, lambda y: self.self_attention.step(y, position, mask))
        y = self.after_cross_attention(y, lambda y: self.cross_attention.recall(y, memory_mask))
        return self.after_feed_forward(y, self.feed_forward)


def embedding(config: Any, deviation: float = 1.0) -> nn.Embed:
    """The vectors [V, d_model] of the vocabulary (section 3.4), which start with such a deviation behind `embed`."""
    c = config
    init = nn.initializers.normal(deviation * c.d_model**-0.5)
    return nn.Embed(c.vocab_size, c.d_model, embedding_init=init)


def embed(vectors: nn.Embed, tokens: jax.Array) -> jax.Array:
    """Tokens [...] -> [..., d_model], times sqrt(d_model) (section 3.4), by which they start with that deviation.

    In float32, whatever the model computes in: the gradient of a frequent word's vector is a sum over many tokens.
    """
    return vectors(tokens) * vectors.features**0.5


def _layers(layer: type[nn.Module], config: EncoderConfig) -> list[nn.Module]:
    """The N layers of a stack; with `remat`, what gradients need of them is computed again instead of kept."""
    if config.remat != "none":
        policies = {"products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "layers": None}
        layer = nn.remat(layer, policy=policies[config.remat], prevent_cse=not config.scan_layers)
    return [layer(config) for _ in range(config.num_layers)]


class Encoder(nn.Module):
    """The left half: token ids in, a vector for each out. Dropout is active when a "dropout" key is given.

    Whoever builds on it gives it its `source_embedding`.
    """

    config: EncoderConfig

    def setup(self):
        c = self.config
        self.positions = Positions(c)
        self.embedding_dropout = Dropout(c.dropout)
        self.encoder = _layers(EncoderLayer, c)
        if c.pre_norm:  # the residual stream was never normalised: do it once at the end of a stack
            self.encoder_norm = layer_norm(c)

    def encode(self, source: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """source [B, S] -> [B, S, d_model]."""
        mask = padding_mask(source) if segments is None else segment_mask(segments, segments)
        x = self._embed(self.source_embedding, source, self._positions(source.shape[1], segments))
        x = self._through(self.encoder, x, mask)
        return self.encoder_norm(x) if self.config.pre_norm else x

    def _through(self, layers: list[nn.Module], x: jax.Array, *others: jax.Array) -> jax.Array:
        if not self.config.scan_layers or self.is_initializing():
            for layer in layers:
                x = layer(x, *others)
            return x
        # Parameters are stacked here, not where they are kept, so that a run looks the same either way.
        params = jax.tree.map(lambda *p: jnp.stack(p), *(layer.variables["params"] for layer in layers))
        keys = jax.random.split(self.make_rng("dropout"), len(layers)) if self.has_rng("dropout") else None
        one = layers[0].clone(parent=None)

        def apply(x, params_and_key):
            params, key = params_and_key
            y: Any = one.apply({"params": params}, x, *others, rngs=None if key is None else {"dropout": key})
            return y, None

        return jax.lax.scan(apply, x, (params, keys))[0]

    def _positions(self, length: int, segments: jax.Array | None) -> jax.Array:
        positions = self.positions(length)
        return positions if segments is None else positions[positions_in_segments(segments)]

    def _embed(self, embedding: nn.Embed, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return self.embedding_dropout((embed(embedding, tokens) + positions).astype(self.config.dtype))


class Transformer(Encoder):
    """The whole model: token ids in, next-token logits out. Dropout is active when a "dropout" key is given."""

    config: TransformerConfig  # pyrefly: ignore (which is never set anew)

    def setup(self):
        super().setup()
        c = self.config
        if c.tie_embeddings:  # section 3.4: one matrix embeds both languages and gives the logits
            self.embedding = self.source_embedding = self.target_embedding = self.output_embedding = embedding(c)
        else:
            self.source_embedding, self.target_embedding, self.output_embedding = (embedding(c) for _ in range(3))
        self.decoder = _layers(DecoderLayer, c)
        if c.pre_norm:
            self.decoder_norm = layer_norm(c)

    def __call__(
        self,
        source: jax.Array,
        target: jax.Array,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
    ) -> jax.Array:
        """source [B, S], target [B, T] -> logits [B, T, V] in float32; those at t see the target before t only.

        Where several pairs share a row, their segments [B, S] and [B, T] keep them apart: 1 for the first pair of a
        row, 2 for the second, 0 for padding.
        """
        return to_logits(*self.features(source, target, source_segments, target_segments))

    def features(
        self,
        source: jax.Array,
        target: jax.Array,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """What the logits are the product of: the decoder's output [B, T, d_model] and the embedding [V, d_model]."""
        memory = self.encode(source, source_segments)
        if source_segments is None or target_segments is None:
            memory_mask = padding_mask(source)
        else:
            memory_mask = segment_mask(target_segments, source_segments)
        return self.decode(target, memory, memory_mask, target_segments)

    def decode(
        self, target: jax.Array, memory: jax.Array, memory_mask: jax.Array, segments: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """target [B, T], memory [B, S, d_model] -> [B, T, d_model], and the embedding [V, d_model] for its logits."""
        length = target.shape[1]
        mask = causal_mask(length)  # keeps out padding too, which stands behind all that has a loss
        if segments is not None:
            mask &= segment_mask(segments, segments)
        y = self._embed(self.target_embedding, shift_right(target, segments), self._positions(length, segments))
        return self._features(self._through(self.decoder, y, mask, memory, memory_mask))

    def begin(self, source: jax.Array, hypotheses: int, length: int) -> None:
        """Encodes source [B, S] and makes room for K hypotheses of at most L tokens for each sentence.

        Fills the collections "memory" (of the sentence) and "cache" (of the outputs so far), each with B in front.
        """
        self.positions(length)  # refuses more than there are
        memory = self.encode(source)
        self.put_variable("memory", "mask", padding_mask(source))
        for layer in self.decoder:
            layer.begin(memory, hypotheses, length)
        self.put_variable("cache", "ancestors", jnp.zeros((source.shape[0], hypotheses, length), jnp.int32))

    def step(self, tokens: jax.Array, parents: jax.Array, position: jax.Array) -> jax.Array:
        """One more token for each hypothesis -> the logits [B, K, V] of the next.

        Args:
          tokens: [B, K], at `position`.
          parents: [B, K], the hypotheses of the step before that these continue.
          position: counts from 0, the begin symbol's.
        """
        itself = jnp.arange(tokens.shape[1])
        ancestors = jnp.take_along_axis(self.get_variable("cache", "ancestors"), parents[:, :, None], axis=1)
        ancestors = ancestors.at[:, :, position].set(itself)
        self.put_variable("cache", "ancestors", ancestors)
        mask = ancestor_mask(ancestors, position, self.config.neighbourhood)
        y = self._embed(self.target_embedding, tokens, self.positions(ancestors.shape[-1])[position])
        for layer in self.decoder:
            y = layer.step(y, position, mask, self.get_variable("memory", "mask"))
        return to_logits(*self._features(y))

    def _features(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.decoder_norm(y) if self.config.pre_norm else y, self.output_embedding.embedding


def to_logits(y: jax.Array, embedding: jax.Array) -> jax.Array:
    """The linear transformation before the softmax (section 3.4): [..., d_model], [V, d_model] -> [..., V], float32."""
    return jnp.einsum("...d,vd->...v", y, embedding.astype(y.dtype), preferred_element_type=jnp.float32)


def attention_maps(
    config: TransformerConfig, params: Any, source: jax.Array, target: jax.Array
) -> dict[str, jax.Array]:
    """The attention weights of one teacher-forced pass over source [B, S] and target [B, T], in float32.

    Returns:
      {"encoder": [N, B, H, S, S], "decoder": [N, B, H, T, T], "cross": [N, B, H, T, S]}, layer by layer.
    """
    config = dataclasses.replace(config, scan_layers=False)  # whose layers keep nothing apart
    _, sown = Transformer(config).apply({"params": params}, source, target, mutable=["intermediates"])
    weights: Any = sown["intermediates"]

    def stack(side, attention):
        return jnp.stack([weights[f"{side}_{n}"][attention]["weights"][0] for n in range(config.num_layers)])

    return {
        "encoder": stack("encoder", "self_attention"),
        "decoder": stack("decoder", "self_attention"),
        "cross": stack("decoder", "cross_attention"),
    }

"""The Transformer (section 3). Read it beside the paper's figure 1; `layers` defines its parts.

Letters of shapes: B batch, S source positions, T target positions, K hypotheses of a search, L longest output,
V vocabulary.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.attention import ancestor_mask, causal_mask, padding_mask, segment_mask
from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.layers import DecoderLayer, Embedding, EncoderLayer, embeddings, to_logits
from transformer_flax.model.positions import Positions, positions_in_segments
from transformer_flax.model.stack import Stack
from transformer_flax.special_tokens import BEGIN_ID


def shift_right(target: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    """Returns the decoder's input [B, T]: the target shifted right by one, after the begin symbol (section 3.1).

    With `segments`, each sentence of a row is shifted separately.
    """
    shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BEGIN_ID)
    return shifted if segments is None else jnp.where(positions_in_segments(segments) == 0, BEGIN_ID, shifted)


class Encoder(Stack):
    """The encoder (section 3.1; figure 1, left): x [B, S, d_model], mask [B, 1, S | 1, S] -> memory [B, S, d_model]."""

    layer, prefix = EncoderLayer, "encoder"


class Decoder(Stack):
    """The decoder (section 3.1; figure 1, right).

    y [B, T, d_model], its mask [B | 1, 1, T, T], memory [B, S, d_model], its mask [B, 1, T | 1, S] -> [B, T, d_model].
    """

    layer, prefix = DecoderLayer, "decoder"

    def init_cache(self, memory: jax.Array, hypotheses: int, length: int) -> None:
        """Caches the memory's keys and values, and allocates the cache for K hypotheses of at most L tokens."""
        for layer in self.layers:
            layer.init_cache(memory, hypotheses, length)

    def decode_step(self, y: jax.Array, position: jax.Array, mask: jax.Array, memory_mask: jax.Array) -> jax.Array:
        """Decodes one position: y [B, K, d_model] at `position`, and masks over the cached keys -> [B, K, d_model]."""
        for layer in self.layers:
            y = layer.decode_step(y, position, mask, memory_mask)
        return self.norm(y)


class Transformer(nn.Module):
    """The whole model (section 3; figure 1): token ids in, next-token logits out.

    Dropout is active when a "dropout" key is given.
    """

    config: TransformerConfig
    encoder_class, decoder_class = Encoder, Decoder  # a kind of model may have others

    def setup(self):
        c = self.config
        self.source_embedding, self.target_embedding, self.output_embedding = embeddings(
            c, tied=c.tie_embeddings, deviation=c.embedding_deviation
        )
        self.positions = Positions(c)
        self.embedding_dropout = Dropout(c.dropout)
        self.encoder, self.decoder = self.encoder_class(c), self.decoder_class(c)
        nn.share_scope(self, self.encoder)  # its parameters are in encoder_0, not in encoder/encoder_0
        nn.share_scope(self, self.decoder)

    def __call__(self, source: jax.Array, target: jax.Array, *segments: jax.Array) -> jax.Array:
        """Computes the logits: source [B, S], target [B, T] -> float32 [B, T, V].

        The logits at position t depend only on the source and on the target before t.

        Segments, of the source [B, S] and of the target [B, T], keep several pairs in a row apart: 1 for the first pair
        of a row, 2 for the second, 0 for padding.
        """
        return to_logits(*self.features(source, target, *segments))

    def features(
        self,
        source: jax.Array,
        target: jax.Array,
        source_segments: jax.Array | None = None,
        target_segments: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the factors of the logits: the decoder's output [B, T, d_model] and the embedding [V, d_model].

        The loss multiplies them itself, in several parts if all logits do not fit into memory.
        """
        memory = self.encode(source, source_segments)
        if source_segments is None or target_segments is None:
            memory_mask = padding_mask(source)
        else:
            memory_mask = segment_mask(target_segments, source_segments)
        return self.decode(target, memory, memory_mask, target_segments), self.output_embedding.embedding

    def encode(self, source: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Encodes source [B, S] -> the memory [B, S, d_model]."""
        mask = padding_mask(source) if segments is None else segment_mask(segments, segments)
        x = self._embed(self.source_embedding, source, self._positions(source.shape[1], segments))
        return self.encoder(x, mask)

    def decode(
        self, target: jax.Array, memory: jax.Array, memory_mask: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Decodes, teacher-forced.

        target [B, T], memory [B, S, d_model], memory_mask [B, 1, T | 1, S] -> the decoder's output [B, T, d_model].
        """
        length = target.shape[1]
        mask = causal_mask(length)  # hides padding too, which comes after all tokens that have a loss
        if segments is not None:
            mask &= segment_mask(segments, segments)
        y = self._embed(self.target_embedding, shift_right(target, segments), self._positions(length, segments))
        return self.decoder(y, mask, memory, memory_mask)

    def init_cache(self, source: jax.Array, hypotheses: int, length: int) -> None:
        """Encodes source [B, S], and allocates the cache for K hypotheses of at most L tokens for each sentence.

        Fills the collections "memory" (of the source sentence) and "cache" (of the output tokens so far). B is the
        first axis of every array.
        """
        self.put_variable("memory", "mask", padding_mask(source))
        self.decoder.init_cache(self.encode(source), hypotheses, length)
        self.put_variable("cache", "ancestors", jnp.zeros((source.shape[0], hypotheses, length), jnp.int32))

    def decode_step(self, tokens: jax.Array, parents: jax.Array, position: jax.Array) -> jax.Array:
        """Extends each hypothesis by one token: tokens [B, K], parents [B, K] -> logits [B, K, V] of the next token.

        `tokens` are the last tokens of the hypotheses, at `position`. The begin symbol is at position 0. `parents` are
        the hypotheses of the previous step that they continue.
        """
        ancestors = jnp.take_along_axis(self.get_variable("cache", "ancestors"), parents[:, :, None], axis=1)
        ancestors = ancestors.at[:, :, position].set(jnp.arange(tokens.shape[1], dtype=jnp.int32))
        self.put_variable("cache", "ancestors", ancestors)
        mask = ancestor_mask(ancestors, position, self.config.neighbourhood)
        y = self._embed(self.target_embedding, tokens, self.positions(ancestors.shape[-1])[position])
        y = self.decoder.decode_step(y, position, mask, self.get_variable("memory", "mask"))
        return to_logits(y, self.output_embedding.embedding)

    def _positions(self, length: int, segments: jax.Array | None) -> jax.Array:
        positions = self.positions(length)
        return positions if segments is None else positions[positions_in_segments(segments)]

    def _embed(self, embedding: Embedding, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return self.embedding_dropout((embedding(tokens) + positions).astype(self.config.dtype))

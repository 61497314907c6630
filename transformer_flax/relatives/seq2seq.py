"""The parts that the recurrent and the convolutional translators share.

Letters of shapes: B batch, S source positions, T target positions, V vocabulary.
"""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax

from transformer_flax.model.attention import attention_weights
from transformer_flax.model.config import ModelConfig
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.layers import Embedding, embeddings, to_logits
from transformer_flax.model.scores import ScoreFunction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(ModelConfig):
    """The fields that both translators have. `configs/recurrent.py` and `configs/convolutional.py` explain each."""

    tie_embeddings: bool


class Memory(NamedTuple):
    """The keys and values that the decoder attends to."""

    keys: jax.Array  # [B, S, d_model]
    values: jax.Array  # [B, S, d_model]
    mask: jax.Array  # bool [B, 1, S], False at padding


def one_head_weights(module: nn.Module, query: jax.Array, memory: Memory, score: ScoreFunction) -> jax.Array:
    """Computes the attention weights of query [B, T, d_model] over the memory: float32 [B, T, S].

    The weights are also sown in `module`.
    """
    weights = attention_weights(query[:, :, None], memory.keys[:, :, None], memory.mask[:, None], score)
    module.sow("intermediates", "weights", weights)
    return weights[:, 0]


class Seq2Seq(nn.Module):
    """A translator: token ids in, next-token logits out. Dropout is active when a "dropout" key is given.

    Subclasses must define `features`, `init_cache` and `decode_step` (`model.registry`).
    """

    config: Seq2SeqConfig

    def setup(self):
        c = self.config
        self.source_embedding, self.target_embedding, self.output_embedding = embeddings(c, tied=c.tie_embeddings)
        self.embedding_dropout = Dropout(c.dropout)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Computes the logits: source [B, S], target [B, T] -> float32 [B, T, V].

        The logits at position t depend only on the source and on the target before t.
        """
        return to_logits(*self.features(source, target))

    def features(self, source: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the factors of the logits: the decoder's output [B, T, d_model] and the embedding [V, d_model]."""
        raise NotImplementedError

    def _embed(self, embedding: Embedding, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        x = embedding(tokens)
        if positions is not None:
            x = x + positions
        return self.embedding_dropout(x.astype(self.config.dtype))

"""What translators of all kinds begin and end with: the words' vectors (section 3.4).

Letters of shapes: B batch, T positions, V vocabulary.
"""

import functools
from typing import Any

import flax.linen as nn
import jax

from transformer_flax.model.dropout import Dropout


class Embedded(nn.Module):
    """A model with embeddings of the source and the target, and the matrix of its logits: one, if they are tied."""

    config: Any  # with vocab_size, d_model, dropout, tie_embeddings and dtype

    def setup(self):
        c = self.config
        embedding = functools.partial(
            nn.Embed, c.vocab_size, c.d_model, dtype=c.dtype, embedding_init=nn.initializers.normal(c.d_model**-0.5)
        )
        if c.tie_embeddings:
            self.embedding = self.source_embedding = self.target_embedding = self.output_embedding = embedding()
        else:
            self.source_embedding, self.target_embedding, self.output_embedding = (embedding() for _ in range(3))
        self.embedding_dropout = Dropout(c.dropout)

    def embed(self, embedding: nn.Embed, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] -> [B, T, d_model], times sqrt(d_model), so that they start with a variance of one."""
        return embedding(tokens) * self.config.d_model**0.5

"""What the rivals of the Transformer have in common: sizes, and the words' vectors that a model begins and ends with.

Letters of shapes: B batch, T positions, V vocabulary.
"""

import dataclasses

import flax.linen as nn
import jax

from transformer_flax.model.config import DTYPES, LARGEST, MOST_LAYERS, require
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.transformer import embedding


@dataclasses.dataclass(frozen=True)
class EmbeddedConfig:
    """Sizes and choices of a rival, whichever it is; the files of `configs/` that are for rivals explain each.

    Raises:
      UserError: a value that none can have, named as the config field it comes from.
    """

    vocab_size: int  # V
    num_layers: int  # N
    d_model: int
    dropout: float
    tie_embeddings: bool
    dtype: str

    def __post_init__(self):
        for name, most in (("vocab_size", LARGEST), ("num_layers", MOST_LAYERS), ("d_model", LARGEST)):
            require_size(self, name, most)
        require(self, "dropout", lambda v: type(v) in (int, float) and 0 <= v < 1, "a number from 0 to below 1")
        require(self, "tie_embeddings", lambda v: type(v) is bool, "True or False")
        require(self, "dtype", lambda v: v in DTYPES, f"one of {', '.join(DTYPES)}")


def require_size(config: EmbeddedConfig, name: str, most: int = LARGEST) -> None:
    require(config, name, lambda v: type(v) is int and 1 <= v <= most, f"a whole number from 1 to {most:,}")


class Embedded(nn.Module):
    """A model with embeddings of the source and the target, and the matrix of its logits: one, if they are tied."""

    config: EmbeddedConfig

    def setup(self):
        c = self.config
        if c.tie_embeddings:  # as the Transformer's (section 3.4)
            self.embedding = self.source_embedding = self.target_embedding = self.output_embedding = embedding(c)
        else:
            self.source_embedding, self.target_embedding, self.output_embedding = (embedding(c) for _ in range(3))
        self.embedding_dropout = Dropout(c.dropout)

    def embed(self, vectors: nn.Embed, tokens: jax.Array) -> jax.Array:
        """Tokens [B, T] -> [B, T, d_model], times sqrt(d_model), so that they start with a variance of one."""
        return vectors(tokens) * self.config.d_model**0.5

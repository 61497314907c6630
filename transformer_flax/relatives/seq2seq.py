"""What the rivals of the Transformer have in common: sizes, and the words' vectors that a model begins and ends with.

Letters of shapes: B batch, T positions, V vocabulary.
"""

import dataclasses

import flax.linen as nn

from transformer_flax.model.config import (
    DTYPES,
    LARGEST,
    MOST_LAYERS,
    require_one_of,
    require_rate,
    require_size,
    require_switch,
)
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
        require_rate(self, "dropout")
        require_switch(self, "tie_embeddings")
        require_one_of(self, "dtype", DTYPES)


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

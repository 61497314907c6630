"""The Transformer's encoder as a classifier of texts: encoder, pooling, linear layer.

Letters of shapes: B batch, S positions, H heads, C classes.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.checked_fields import one_of, positive, size
from transformer_flax.model.attention import MultiHeadAttention, padding_mask
from transformer_flax.model.config import STARTS, LayerConfig
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.layers import Embedding
from transformer_flax.model.positions import Positions
from transformer_flax.model.registry import Kind, register
from transformer_flax.model.transformer import Encoder

POOLING = ("mean", "max", "first", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig(LayerConfig):
    """The fields of a classifier. `configs/classifier.py` explains those that the Transformer does not have."""

    pooling: str = one_of(POOLING)
    num_classes: int = size(least=2)  # C
    embedding_deviation: float = positive(default=1.0)
    # T-Fixup has no factors for an encoder alone.
    start: str = one_of(tuple(start for start in STARTS if start != "t_fixup"), default="xavier")


class Pooling(nn.Module):
    """One vector for a whole text, computed without padding.

    The vector is the mean of the encoder's outputs, their element-wise maximum, the first token's output, or multi-head
    attention from one learned query.
    """

    config: ClassifierConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x [B, S, d_model], mask [B, 1, 1, S] -> [B, d_model]. The result is finite also for a row without tokens."""
        c = self.config
        if c.pooling == "first":
            return x[:, 0]
        if c.pooling == "attention":
            query = self.param("query", nn.initializers.normal(c.d_model**-0.5), (c.d_model,))
            # The cast comes after the broadcast, so that the query's gradient is summed over the texts in float32.
            query = jnp.broadcast_to(query, (x.shape[0], 1, c.d_model)).astype(c.dtype)
            c = dataclasses.replace(c, attention_implementation="plain")  # cuDNN takes no odd number of queries
            return MultiHeadAttention(c, name="attention")(query, x, mask)[:, 0]
        there = mask[:, 0, 0, :, None]  # [B, S, 1]
        if c.pooling == "max":
            largest = jnp.max(jnp.where(there, x, jnp.finfo(x.dtype).min), axis=1)
            return jnp.where(jnp.any(there, axis=1), largest, 0)
        total = jnp.sum(jnp.where(there, x, 0), axis=1, dtype=jnp.float32)
        return (total / jnp.maximum(jnp.sum(there, axis=1), 1)).astype(c.dtype)


class Classifier(nn.Module):
    """A classifier: token ids in, a logit for each class out. Dropout is active when a "dropout" key is given."""

    config: ClassifierConfig

    def setup(self):
        c = self.config
        self.embedding = Embedding(c, c.embedding_deviation)
        self.positions = Positions(c)
        self.embedding_dropout, self.pooled_dropout = Dropout(c.dropout), Dropout(c.dropout)
        self.encoder = Encoder(c)
        nn.share_scope(self, self.encoder)
        self.pooling = Pooling(c)
        self.output = nn.Dense(c.num_classes, dtype=jnp.float32, kernel_init=nn.initializers.xavier_uniform())

    def __call__(self, source: jax.Array) -> jax.Array:
        """Computes the logits: source [B, S] -> float32 [B, C]."""
        pooled = self.pooling(self.encode(source), padding_mask(source))
        return self.output(self.pooled_dropout(pooled))

    def encode(self, source: jax.Array) -> jax.Array:
        """Encodes source [B, S] -> [B, S, d_model]."""
        x = self.embedding(source) + self.positions(source.shape[1])
        return self.encoder(self.embedding_dropout(x.astype(self.config.dtype)), padding_mask(source))


register(
    "classifier",
    Kind(
        ClassifierConfig,
        Classifier,
        attention={"encoder": "encoder_*/self_attention", "pooling": "pooling/attention"},
        classifies=True,
    ),
)

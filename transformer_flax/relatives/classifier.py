"""The encoder alone, telling classes of texts apart: encoder, pooling, linear layer.

Letters of shapes: B batch, S positions, H heads, C classes.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.attention import MultiHeadAttention, padding_mask
from transformer_flax.model.config import EncoderConfig, require, require_one_of, require_size
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.transformer import Encoder, embedding

POOLING = ("mean", "max", "first", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig(EncoderConfig):
    """Sizes and choices of a classifier; `configs/classifier.py` explains those that the Transformer has not."""

    pooling: str
    num_classes: int  # C
    embedding_deviation: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        require_one_of(self, "pooling", POOLING)
        require_size(self, "num_classes", least=2)
        require(self, "embedding_deviation", lambda v: type(v) in (int, float) and v > 0, "above 0")


class Pooling(nn.Module):
    """One vector for a whole text; padding has no part in it.

    The mean of the encoder's outputs, the largest of each of their elements, the first token's, or what multi-head
    attention from one query, which is learned, finds in them.
    """

    config: ClassifierConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x [B, S, d_model], mask [B, 1, 1, S] -> [B, d_model]; of a row without a token, some finite vector."""
        c = self.config
        if c.pooling == "first":
            return x[:, 0]
        if c.pooling == "attention":
            query = self.param("query", nn.initializers.normal(c.d_model**-0.5), (c.d_model,))
            # Cast once broadcast, so that its gradient is summed over the texts in float32.
            query = jnp.broadcast_to(query, (x.shape[0], 1, c.d_model)).astype(c.dtype)
            return MultiHeadAttention(c, name="attention")(query, x, mask)[:, 0]
        there = mask[:, 0, 0, :, None]  # [B, S, 1]
        if c.pooling == "max":
            largest = jnp.max(jnp.where(there, x, jnp.finfo(x.dtype).min), axis=1)
            return jnp.where(jnp.any(there, axis=1), largest, 0)
        total = jnp.sum(jnp.where(there, x, 0), axis=1, dtype=jnp.float32)
        return (total / jnp.maximum(jnp.sum(there, axis=1), 1)).astype(c.dtype)


class Classifier(Encoder):
    """Token ids in, a logit for each class out. Dropout, also of what is pooled, is active when a key is given."""

    config: ClassifierConfig  # pyrefly: ignore (which is never set anew)

    def setup(self):
        super().setup()
        c = self.config
        self.embedding = self.source_embedding = embedding(c, c.embedding_deviation)
        self.pooling = Pooling(c)
        self.pooled_dropout = Dropout(c.dropout)
        self.output = nn.Dense(c.num_classes, dtype=jnp.float32, kernel_init=nn.initializers.xavier_uniform())

    def __call__(self, source: jax.Array) -> jax.Array:
        """source [B, S] -> logits [B, C] in float32."""
        pooled = self.pooling(self.encode(source), padding_mask(source))
        return self.output(self.pooled_dropout(pooled))


def attention_maps(config: ClassifierConfig, params: Any, source: jax.Array) -> dict[str, jax.Array]:
    """The attention weights of one pass over source [B, S], in float32.

    Returns:
      {"encoder": [N, B, H, S, S]}, layer by layer, and where pooling attends {"pooling": [1, B, H, 1, S]}.
    """
    config = dataclasses.replace(config, scan_layers=False)  # whose layers keep nothing apart
    _, sown = Classifier(config).apply({"params": params}, source, mutable=["intermediates"])
    weights: Any = sown["intermediates"]
    layers = [weights[f"encoder_{n}"]["self_attention"]["weights"][0] for n in range(config.num_layers)]
    maps = {"encoder": jnp.stack(layers)}
    if config.pooling == "attention":
        maps["pooling"] = jnp.stack([weights["pooling"]["attention"]["weights"][0]])
    return maps

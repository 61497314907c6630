"""What a model costs, from its config alone."""

import numpy as np

from transformer_flax.model.config import TransformerConfig


def count_parameters(config: TransformerConfig) -> dict[str, int]:
    """Parameters by part; their sum is exact.

    attention = d_model h (2 d_k + 2 d_v)    FFN = 2 d_model d_ff + d_ff + d_model    LayerNorm = 2 d_model
    encoder layer = attention + FFN + 2 LayerNorm    decoder layer = 2 attention + FFN + 3 LayerNorm
    """
    c = config
    attention = c.d_model * c.num_heads * (2 * c.d_k + 2 * c.d_v)
    if c.attention_bias:
        attention += c.num_heads * (2 * c.d_k + c.d_v) + c.d_model
    ffn = 2 * c.d_model * c.d_ff + c.d_ff + c.d_model
    layer_norm = 2 * c.d_model
    final_norm = layer_norm if c.pre_norm else 0
    return {
        "embeddings": (1 if c.tie_embeddings else 3) * c.vocab_size * c.d_model,
        "positions": c.max_length * c.d_model if c.positions == "learned" else 0,
        "encoder": c.num_layers * (attention + ffn + 2 * layer_norm) + final_norm,
        "decoder": c.num_layers * (2 * attention + ffn + 3 * layer_norm) + final_norm,
    }


def training_flops(config: TransformerConfig, source_lengths: np.ndarray, target_lengths: np.ndarray) -> int:
    """Floating-point operations that an update on sentence pairs of these lengths [pairs] needs: "model FLOPs".

    6 for each token and element of a matrix that it is multiplied with (a product and a sum, forwards, and twice that
    backwards), and the same for attention's two products, as if nothing were masked. Padding, recomputation, lookups
    and whatever is no matrix product count nothing.
    """
    c = config
    source, target = (np.asarray(lengths, np.int64) for lengths in (source_lengths, target_lengths))
    projections = c.d_model * c.num_heads * (c.d_k + c.d_v)  # of queries and outputs, or of keys and values
    ffn = 2 * c.d_model * c.d_ff
    products = c.num_heads * (c.d_k + c.d_v)  # Q K^T and weights V, for each query and key
    encoder = source.sum() * (2 * projections + ffn) + (source**2).sum() * products
    decoder = (
        target.sum() * (3 * projections + ffn)
        + source.sum() * projections
        + (target**2 + source * target).sum() * products
    )
    return int(6 * (c.num_layers * (encoder + decoder) + target.sum() * c.d_model * c.vocab_size))

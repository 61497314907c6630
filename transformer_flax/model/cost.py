"""What a model costs, from its config alone."""

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

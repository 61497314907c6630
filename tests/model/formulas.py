"""Parameters and floating-point operations of a Transformer by module, from formulas: the check of what is counted."""

import numpy as np

from transformer_flax.model.config import TransformerConfig


def parameters_by_hand(c: TransformerConfig) -> dict[str, int]:
    attention = c.d_model * c.num_heads * (2 * c.d_k + 2 * c.d_v)
    if c.attention_bias:
        attention += c.num_heads * (2 * c.d_k + c.d_v) + c.d_model
    if c.compatibility == "additive":
        attention += c.num_heads * c.d_k
    after = {"t_fixup": 0, "admin": 3 * c.d_model}.get(c.start, 2 * c.d_model)
    parts = {
        "self_attention": attention + ((2 * c.clip_distance + 1) * c.d_k if c.positions == "relative" else 0),
        "feed_forward": 2 * c.d_model * c.d_ff + c.d_ff + c.d_model,
        "after_self_attention": after,
        "after_feed_forward": after,
    }
    names = ("embedding",) if c.tie_embeddings else ("source_embedding", "target_embedding", "output_embedding")
    counts = dict.fromkeys(names, c.vocab_size * c.d_model)
    counts |= {"positions": c.max_length * c.d_model} if c.positions == "learned" else {}
    for stack in ("encoder", "decoder"):
        cross = {"cross_attention": attention, "after_cross_attention": after} if stack == "decoder" else {}
        counts |= {f"{stack}/{part}": c.num_layers * count for part, count in (parts | cross).items()}
        counts |= {f"{stack}_norm": 2 * c.d_model} if c.pre_norm else {}
    return {module: count for module, count in counts.items() if count}


def flops_by_hand(c: TransformerConfig, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    projections, products = c.d_model * c.num_heads * (c.d_k + c.d_v), c.num_heads * (c.d_k + c.d_v)
    to_itself = products
    if c.positions == "relative" and c.compatibility != "additive":  # which adds the distances to the keys instead
        to_itself += c.num_heads * c.d_k  # queries with the embeddings of distances
    widest = 2 * (c.neighbourhood // 2) + 1 if c.neighbourhood else None
    s, t, pairs = source.sum(), target.sum(), (source * target).sum()
    counts = {"decoder/cross_attention": (s + t) * projections + pairs * products}
    for stack, lengths in (("encoder", source), ("decoder", target)):
        seen = (lengths * np.clip(lengths, None, widest)).sum()
        counts[f"{stack}/self_attention"] = lengths.sum() * 2 * projections + seen * to_itself
        counts[f"{stack}/feed_forward"] = lengths.sum() * 2 * c.d_model * c.d_ff
    return {module: 2 * c.num_layers * count for module, count in counts.items()} | {
        "logits": 2 * t * c.d_model * c.vocab_size
    }

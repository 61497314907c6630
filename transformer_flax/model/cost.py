"""What a model costs, from its config alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.convolutional import ConvolutionalConfig
from transformer_flax.model.kinds import Config, init_params, make_model
from transformer_flax.model.recurrent import RecurrentConfig


@functools.singledispatch
def count_modules(config: Config) -> dict[str, int]:
    """Parameters by module; their sum is exact."""
    raise TypeError(f"no kind of model has a config like {config!r}")


@count_modules.register
def _transformer_modules(config: TransformerConfig) -> dict[str, int]:
    """attention = d_model h (2 d_k + 2 d_v)    FFN = 2 d_model d_ff + d_ff + d_model    LayerNorm = 2 d_model
    encoder layer = attention + FFN + 2 LayerNorm    decoder layer = 2 attention + FFN + 3 LayerNorm

    Additive compatibility adds h d_k to each attention, relative positions (2 clip_distance + 1) d_k to self-attention.
    """
    c = config
    attention = c.d_model * c.num_heads * (2 * c.d_k + 2 * c.d_v)
    if c.attention_bias:
        attention += c.num_heads * (2 * c.d_k + c.d_v) + c.d_model
    if c.compatibility == "additive":
        attention += c.num_heads * c.d_k
    self_attention = attention + ((2 * c.clip_distance + 1) * c.d_k if c.positions == "relative" else 0)
    ffn = 2 * c.d_model * c.d_ff + c.d_ff + c.d_model
    layer_norm = 2 * c.d_model
    final_norm = layer_norm if c.pre_norm else 0
    return {
        "embeddings": (1 if c.tie_embeddings else 3) * c.vocab_size * c.d_model,
        "positions": c.max_length * c.d_model if c.positions == "learned" else 0,
        "encoder self-attention": c.num_layers * self_attention,
        "encoder feed-forward": c.num_layers * ffn,
        "encoder LayerNorm": c.num_layers * 2 * layer_norm + final_norm,
        "decoder self-attention": c.num_layers * self_attention,
        "decoder cross-attention": c.num_layers * attention,
        "decoder feed-forward": c.num_layers * ffn,
        "decoder LayerNorm": c.num_layers * 3 * layer_norm + final_norm,
    }


@count_modules.register
def _recurrent_modules(config: RecurrentConfig) -> dict[str, int]:
    """cell = gates d_out (d_in + d_out) + 4 d_out, with 3 gates of a GRU and 4 of an LSTM."""
    c = config
    half = c.d_model // 2
    return {
        "embeddings": (1 if c.tie_embeddings else 3) * c.vocab_size * c.d_model,
        "encoder recurrence": c.num_layers * 2 * (_cell_elements(c, half) + 4 * half),
        "decoder recurrence": c.num_layers * (_cell_elements(c, c.d_model) + 4 * c.d_model),
        "decoder attention": 2 * c.d_model**2 + c.d_model if c.attention == "additive" else 0,
        "decoder output": 2 * c.d_model**2 + c.d_model,
    }


def _cell_elements(config: RecurrentConfig, features: int) -> int:
    """Of the matrices of a cell, whose input is as wide as the model."""
    return {"gru": 3, "lstm": 4}[config.cell] * features * (config.d_model + features)


@count_modules.register
def _convolutional_modules(config: ConvolutionalConfig) -> dict[str, int]:
    """convolution = 2 k d_model^2 + 2 d_model    attention = 2 (d_model^2 + d_model)"""
    c = config
    convolution = 2 * c.kernel_width * c.d_model**2 + 2 * c.d_model
    linear = c.d_model**2 + c.d_model
    return {
        "embeddings": (1 if c.tie_embeddings else 3) * c.vocab_size * c.d_model,
        "positions": c.max_length * c.d_model,
        "encoder convolutions": c.num_layers * convolution,
        "decoder convolutions": c.num_layers * convolution,
        "decoder attention": c.num_layers * 2 * linear,
        "decoder output": linear,
    }


def count_parameters(config: Config) -> dict[str, int]:
    """Parameters by part: embeddings, positions, encoder and decoder."""
    parts: dict[str, int] = {}
    for module, count in count_modules(config).items():
        part = module.split()[0]
        parts[part] = parts.get(part, 0) + count
    return parts


def forward_flops(config: Config, source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, int]:
    """Floating-point operations, by module, that the logits of sentence pairs of these lengths [pairs] need.

    2 for each token and element of a matrix that it is multiplied with, a product and a sum, and the same for
    attention's two products, as if nothing were masked but what is outside of neighbourhoods. Padding, lookups and
    whatever is no matrix product count nothing.
    """
    source, target = (np.asarray(lengths, np.int64) for lengths in (source_lengths, target_lengths))
    elements = _elements(config, source, target)
    elements["logits"] = int(target.sum()) * config.d_model * config.vocab_size
    return {module: 2 * count for module, count in elements.items()}


@functools.singledispatch
def _elements(config: Config, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    """Products of two numbers, by module, that sentence pairs of these lengths need before their logits."""
    raise TypeError(f"no kind of model has a config like {config!r}")


@_elements.register
def _transformer_elements(config: TransformerConfig, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    c = config
    s, t = int(source.sum()), int(target.sum())
    projections = c.d_model * c.num_heads * (c.d_k + c.d_v)  # of queries and outputs, or of keys and values
    products = c.num_heads * (c.d_k + c.d_v)  # Q K^T, or v . tanh(q + k), and weights V, for each query and key
    # Queries with the embeddings of distances, which an additive compatibility adds to the keys instead.
    offsets = c.num_heads * c.d_k if c.positions == "relative" and c.compatibility != "additive" else 0
    ffn = 2 * c.d_model * c.d_ff
    widest = 2 * (c.neighbourhood // 2) + 1 if c.neighbourhood else None  # that self-attention sees
    source_pairs, target_pairs = (int((n * np.clip(n, None, widest)).sum()) for n in (source, target))
    elements = {
        "encoder self-attention": s * 2 * projections + source_pairs * (products + offsets),
        "encoder feed-forward": s * ffn,
        "decoder self-attention": t * 2 * projections + target_pairs * (products + offsets),
        "decoder cross-attention": (t + s) * projections + int((source * target).sum()) * products,
        "decoder feed-forward": t * ffn,
    }
    return {module: c.num_layers * each for module, each in elements.items()}


@_elements.register
def _recurrent_elements(config: RecurrentConfig, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    c = config
    s, t, pairs = int(source.sum()), int(target.sum()), int((source * target).sum())
    projections = (s + t) * c.d_model**2 if c.attention == "additive" else 0
    products = pairs * 2 * c.d_model if c.attention != "none" else 0  # scores, and weights times values
    return {
        "encoder recurrence": c.num_layers * s * 2 * _cell_elements(c, c.d_model // 2),
        "decoder recurrence": c.num_layers * t * _cell_elements(c, c.d_model),
        "decoder attention": projections + products,
        "decoder output": t * 2 * c.d_model**2,
    }


@_elements.register
def _convolutional_elements(config: ConvolutionalConfig, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    c = config
    s, t, pairs = int(source.sum()), int(target.sum()), int((source * target).sum())
    convolution = 2 * c.kernel_width * c.d_model**2
    return {
        "encoder convolutions": c.num_layers * s * convolution,
        "decoder convolutions": c.num_layers * t * convolution,
        "decoder attention": c.num_layers * (t * 2 * c.d_model**2 + pairs * 2 * c.d_model),
        "decoder output": t * c.d_model**2,
    }


def training_flops(config: Config, source_lengths: np.ndarray, target_lengths: np.ndarray) -> int:
    """Floating-point operations of an update on sentence pairs of these lengths [pairs]: "model FLOPs".

    The gradient with respect to either factor of a product takes as much as the product, so it is three times
    `forward_flops`. Recomputation counts nothing.
    """
    return 3 * sum(forward_flops(config, source_lengths, target_lengths).values())


def activation_bytes(config: Config, rows: int, source_length: int, target_length: int, *, loss_chunks: int = 1) -> int:
    """Bytes that differentiation keeps of the forward pass, over `rows` pairs of these lengths, with dropout.

    They are those of the program as it is written, found without running it, and the logits of one of `loss_chunks`.
    XLA keeps less where it computes what is cheap a second time, and needs a little room besides.
    """
    source, target = (jax.ShapeDtypeStruct((rows, length), jnp.int32) for length in (source_length, target_length))

    def kept(params: Any, source: jax.Array, target: jax.Array) -> list[jax.Array]:
        def features(params):
            rngs = {"dropout": jax.random.key(0)}
            y: Any = make_model(config).apply({"params": params}, source, target, rngs=rngs, method="features")
            return y[0]

        y, backward = jax.vjp(features, params)
        given = {id(leaf) for leaf in jax.tree.leaves((params, source, target))}
        return [y, *(leaf for leaf in jax.tree.leaves(backward) if id(leaf) not in given)]

    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    leaves = jax.eval_shape(kept, params, source, target)
    logits = 4 * rows * target_length * config.vocab_size // loss_chunks
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + logits

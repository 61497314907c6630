"""What a model costs, from its config alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.model.classifier import ClassifierConfig
from transformer_flax.model.config import EncoderConfig, TransformerConfig
from transformer_flax.model.convolutional import ConvolutionalConfig
from transformer_flax.model.kinds import Config, init_params, kind_of, make_model
from transformer_flax.model.recurrent import RecurrentConfig


@functools.singledispatch
def count_modules(config: Config) -> dict[str, int]:
    """Parameters by module; their sum is exact.

    attention = d_model h (2 d_k + 2 d_v)    FFN = 2 d_model d_ff + d_ff + d_model    LayerNorm = 2 d_model
    encoder layer = attention + FFN + 2 LayerNorm     decoder layer = 2 attention + FFN + 3 LayerNorm

    Additive compatibility adds h d_k to each attention, relative positions (2 clip_distance + 1) d_k to self-attention.
    Those of other kinds of models are where they are counted.
    """
    raise NotImplementedError(type(config))


@count_modules.register
def _(config: TransformerConfig) -> dict[str, int]:
    c = config
    attention, ffn, layer_norm = _sublayers(c)
    return {
        **_encoder_modules(c),
        "embeddings": (1 if c.tie_embeddings else 3) * c.vocab_size * c.d_model,
        "decoder self-attention": c.num_layers * (attention + _distances(c)),
        "decoder cross-attention": c.num_layers * attention,
        "decoder feed-forward": c.num_layers * ffn,
        "decoder LayerNorm": (c.num_layers * 3 + c.pre_norm) * layer_norm,
    }


@count_modules.register
def _(config: ClassifierConfig) -> dict[str, int]:
    c = config
    attention, _, _ = _sublayers(c)
    return {
        **_encoder_modules(c),
        "classifier pooling": c.d_model + attention if c.pooling == "attention" else 0,
        "classifier output": (c.d_model + 1) * c.num_classes,
    }


def _encoder_modules(config: EncoderConfig) -> dict[str, int]:
    """With one matrix of embeddings."""
    c = config
    attention, ffn, layer_norm = _sublayers(c)
    return {
        "embeddings": c.vocab_size * c.d_model,
        "positions": c.max_length * c.d_model if c.positions == "learned" else 0,
        "encoder self-attention": c.num_layers * (attention + _distances(c)),
        "encoder feed-forward": c.num_layers * ffn,
        "encoder LayerNorm": (c.num_layers * 2 + c.pre_norm) * layer_norm,
    }


def _sublayers(config: EncoderConfig) -> tuple[int, int, int]:
    """Parameters of an attention, of an FFN and of a LayerNorm."""
    c = config
    attention = c.d_model * c.num_heads * (2 * c.d_k + 2 * c.d_v)
    if c.attention_bias:
        attention += c.num_heads * (2 * c.d_k + c.d_v) + c.d_model
    if c.compatibility == "additive":
        attention += c.num_heads * c.d_k
    return attention, 2 * c.d_model * c.d_ff + c.d_ff + c.d_model, 2 * c.d_model


def _distances(config: EncoderConfig) -> int:
    """Parameters that self-attention has more than other attention."""
    return (2 * config.clip_distance + 1) * config.d_k if config.positions == "relative" else 0


@count_modules.register
def _(config: RecurrentConfig) -> dict[str, int]:
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
def _(config: ConvolutionalConfig) -> dict[str, int]:
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
    """Parameters by part: embeddings, positions, encoder, and decoder or classifier."""
    parts: dict[str, int] = {}
    for module, count in count_modules(config).items():
        part = module.split()[0]
        parts[part] = parts.get(part, 0) + count
    return parts


@functools.singledispatch
def forward_flops(config: Config, source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, int]:
    """Floating-point operations, by module, that the logits of sentence pairs of these lengths [pairs] need.

    2 for each token and element of a matrix that it is multiplied with, a product and a sum, and the same for
    attention's two products, as if nothing were masked but what is outside of neighbourhoods. Padding, lookups and
    whatever is no matrix product count nothing.
    """
    raise NotImplementedError(type(config))


@forward_flops.register
def _(config: TransformerConfig, source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, int]:
    c = config
    source, target = (np.asarray(lengths, np.int64) for lengths in (source_lengths, target_lengths))
    s, t = int(source.sum()), int(target.sum())
    projections, products = _attention_flops(c)
    return {
        **_stack_flops(c, "encoder", source),
        **_stack_flops(c, "decoder", target),
        "decoder cross-attention": c.num_layers * ((t + s) * projections + int((source * target).sum()) * products),
        "logits": 2 * t * c.d_model * c.vocab_size,
    }


@forward_flops.register
def _(config: ClassifierConfig, source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, int]:
    del target_lengths  # of labels, which it does not read
    c = config
    source = np.asarray(source_lengths, np.int64)
    s, texts = int(source.sum()), len(source)
    projections, products = _attention_flops(c)
    return {
        **_stack_flops(c, "encoder", source),
        "classifier pooling": (texts + s) * projections + s * products if c.pooling == "attention" else 0,
        "logits": 2 * texts * c.d_model * c.num_classes,
    }


@forward_flops.register
def _(config: RecurrentConfig, source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, int]:
    c = config
    s, t, pairs = _tokens_and_pairs(source_lengths, target_lengths)
    projections = 2 * (s + t) * c.d_model**2 if c.attention == "additive" else 0
    products = 4 * pairs * c.d_model if c.attention != "none" else 0  # scores, and weights times values
    return {
        "encoder recurrence": 2 * c.num_layers * s * 2 * _cell_elements(c, c.d_model // 2),
        "decoder recurrence": 2 * c.num_layers * t * _cell_elements(c, c.d_model),
        "decoder attention": projections + products,
        "decoder output": 4 * t * c.d_model**2,
        "logits": 2 * t * c.d_model * c.vocab_size,
    }


@forward_flops.register
def _(config: ConvolutionalConfig, source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, int]:
    c = config
    s, t, pairs = _tokens_and_pairs(source_lengths, target_lengths)
    convolution = 4 * c.kernel_width * c.d_model**2
    return {
        "encoder convolutions": c.num_layers * s * convolution,
        "decoder convolutions": c.num_layers * t * convolution,
        "decoder attention": c.num_layers * 4 * (t * c.d_model**2 + pairs * c.d_model),
        "decoder output": 2 * t * c.d_model**2,
        "logits": 2 * t * c.d_model * c.vocab_size,
    }


def _tokens_and_pairs(source_lengths: np.ndarray, target_lengths: np.ndarray) -> tuple[int, int, int]:
    """Tokens of the source, tokens of the target, and pairs of one of the other's in the same sentence pair."""
    source, target = (np.asarray(lengths, np.int64) for lengths in (source_lengths, target_lengths))
    return int(source.sum()), int(target.sum()), int((source * target).sum())


def _stack_flops(config: EncoderConfig, stack: str, lengths: np.ndarray) -> dict[str, int]:
    """Of self-attention and feed-forward in all layers."""
    c = config
    tokens = int(lengths.sum())
    projections, products = _attention_flops(c)
    widest = 2 * (c.neighbourhood // 2) + 1 if c.neighbourhood else None  # that self-attention sees
    pairs = int((lengths * np.clip(lengths, None, widest)).sum())
    # Queries with the embeddings of distances, which an additive compatibility adds to the keys instead.
    offsets = 2 * c.num_heads * c.d_k if c.positions == "relative" and c.compatibility != "additive" else 0
    return {
        f"{stack} self-attention": c.num_layers * (tokens * 2 * projections + pairs * (products + offsets)),
        f"{stack} feed-forward": c.num_layers * tokens * 4 * c.d_model * c.d_ff,
    }


def _attention_flops(config: EncoderConfig) -> tuple[int, int]:
    """Of a token's query and output, or its key and value; and, for a query and a key, of Q K^T, or v . tanh(q + k),
    and of weights V."""
    c = config
    return 2 * c.d_model * c.num_heads * (c.d_k + c.d_v), 2 * c.num_heads * (c.d_k + c.d_v)


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
    reads = kind_of(config).reads
    lengths = {"source": source_length, "target": target_length}
    sides = [jax.ShapeDtypeStruct((rows, lengths[side]), jnp.int32) for side in reads]
    translates = "target" in reads

    def kept(params: Any, *sides: jax.Array) -> list[jax.Array]:
        def features(params):
            rngs = {"dropout": jax.random.key(0)}
            method = "features" if translates else None
            y: Any = make_model(config).apply({"params": params}, *sides, rngs=rngs, method=method)
            return y[0] if translates else y

        y, backward = jax.vjp(features, params)
        given = {id(leaf) for leaf in jax.tree.leaves((params, sides))}
        return [y, *(leaf for leaf in jax.tree.leaves(backward) if id(leaf) not in given)]

    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    leaves = jax.eval_shape(kept, params, *sides)
    logits = 4 * rows * target_length * config.vocab_size // loss_chunks if translates else 0
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + logits

"""What a model costs, from its config alone."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from transformer_flax.errors import UserError
from transformer_flax.model.config import EncoderConfig, TransformerConfig
from transformer_flax.model.registry import Config, init_params, kind_of, make_model, most_positions
from transformer_flax.relatives.classifier import ClassifierConfig
from transformer_flax.relatives.convolutional import ConvolutionalConfig
from transformer_flax.relatives.recurrent import RecurrentConfig


@functools.singledispatch
def count_modules(config: Config) -> dict[str, int]:
    """Parameters by module; their sum is exact."""
    raise TypeError(f"no kind of model has a config like {config!r}")


@count_modules.register
def _transformer_modules(config: TransformerConfig) -> dict[str, int]:
    """encoder layer = attention + FFN + 2 LayerNorm    decoder layer = 2 attention + FFN + 3 LayerNorm"""
    c = config
    attention, self_attention, ffn, layer_norm = _sublayers(c)
    return {
        **_encoder_modules(c),
        "embeddings": (1 if c.tie_embeddings else 3) * c.vocab_size * c.d_model,
        "decoder self-attention": c.num_layers * self_attention,
        "decoder cross-attention": c.num_layers * attention,
        "decoder feed-forward": c.num_layers * ffn,
        "decoder LayerNorm": (c.num_layers * 3 + c.pre_norm) * layer_norm,
    }


@count_modules.register
def _classifier_modules(config: ClassifierConfig) -> dict[str, int]:
    c = config
    attention, *_ = _sublayers(c)
    return {
        **_encoder_modules(c),
        "classifier pooling": c.d_model + attention if c.pooling == "attention" else 0,
        "classifier output": (c.d_model + 1) * c.num_classes,
    }


def _encoder_modules(config: EncoderConfig) -> dict[str, int]:
    """With one matrix of embeddings."""
    c = config
    _, self_attention, ffn, layer_norm = _sublayers(c)
    return {
        "embeddings": c.vocab_size * c.d_model,
        "positions": c.max_length * c.d_model if c.positions == "learned" else 0,
        "encoder self-attention": c.num_layers * self_attention,
        "encoder feed-forward": c.num_layers * ffn,
        "encoder LayerNorm": (c.num_layers * 2 + c.pre_norm) * layer_norm,
    }


def _sublayers(config: EncoderConfig) -> tuple[int, int, int, int]:
    """Parameters of an attention, of a self-attention, of an FFN and of a LayerNorm.

    attention = d_model h (2 d_k + 2 d_v)    FFN = 2 d_model d_ff + d_ff + d_model    LayerNorm = 2 d_model

    Additive compatibility adds h d_k to each attention, relative positions (2 clip_distance + 1) d_k to self-attention.
    """
    c = config
    attention = c.d_model * c.num_heads * (2 * c.d_k + 2 * c.d_v)
    if c.attention_bias:
        attention += c.num_heads * (2 * c.d_k + c.d_v) + c.d_model
    if c.compatibility == "additive":
        attention += c.num_heads * c.d_k
    self_attention = attention + ((2 * c.clip_distance + 1) * c.d_k if c.positions == "relative" else 0)
    return attention, self_attention, 2 * c.d_model * c.d_ff + c.d_ff + c.d_model, 2 * c.d_model


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
    """Parameters by part: embeddings, positions, encoder, and decoder or classifier."""
    parts: dict[str, int] = {}
    for module, count in count_modules(config).items():
        part = module.split()[0]
        parts[part] = parts.get(part, 0) + count
    return parts


def forward_flops(config: Config, source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, int]:
    """Floating-point operations, by module, that the logits of sentence pairs of these lengths [pairs] need.

    2 for each token and element of a matrix that it is multiplied with, a product and a sum, and the same for
    attention's two products, as if nothing were masked but what is outside of neighbourhoods. Padding, lookups and
    whatever is no matrix product count nothing. A classifier reads the source alone.
    """
    elements = _elements(config, *(np.asarray(lengths, np.int64) for lengths in (source_lengths, target_lengths)))
    return {module: 2 * count for module, count in elements.items()}


@functools.singledispatch
def _elements(config: Config, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    """Products of two numbers, by module, that sentence pairs of these lengths need."""
    raise TypeError(f"no kind of model has a config like {config!r}")


@_elements.register
def _transformer_elements(config: TransformerConfig, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    c = config
    s, t, pairs = int(source.sum()), int(target.sum()), int((source * target).sum())
    projections, products = _attention_elements(c)
    return {
        **_stack_elements(c, "encoder", source),
        **_stack_elements(c, "decoder", target),
        "decoder cross-attention": c.num_layers * ((t + s) * projections + pairs * products),
        "logits": t * c.d_model * c.vocab_size,
    }


@_elements.register
def _classifier_elements(config: ClassifierConfig, source: np.ndarray, target: np.ndarray) -> dict[str, int]:
    c = config
    s, texts = int(source.sum()), len(source)
    projections, products = _attention_elements(c)
    return {
        **_stack_elements(c, "encoder", source),
        "classifier pooling": (texts + s) * projections + s * products if c.pooling == "attention" else 0,
        "logits": texts * c.d_model * c.num_classes,
    }


def _stack_elements(config: EncoderConfig, stack: str, lengths: np.ndarray) -> dict[str, int]:
    """Of self-attention and feed-forward in all layers."""
    c = config
    tokens = int(lengths.sum())
    projections, products = _attention_elements(c)
    if c.positions == "relative" and c.compatibility != "additive":  # which adds the distances to the keys instead
        products += c.num_heads * c.d_k  # queries with the embeddings of distances
    widest = 2 * (c.neighbourhood // 2) + 1 if c.neighbourhood else None  # that self-attention sees
    pairs = int((lengths * np.clip(lengths, None, widest)).sum())
    return {
        f"{stack} self-attention": c.num_layers * (tokens * 2 * projections + pairs * products),
        f"{stack} feed-forward": c.num_layers * tokens * 2 * c.d_model * c.d_ff,
    }


def _attention_elements(config: EncoderConfig) -> tuple[int, int]:
    """Of a token's query and output, or its key and value; and, for a query and a key, of Q K^T and of weights V."""
    c = config
    return c.d_model * c.num_heads * (c.d_k + c.d_v), c.num_heads * (c.d_k + c.d_v)


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
        "logits": t * c.d_model * c.vocab_size,
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
        "logits": t * c.d_model * c.vocab_size,
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


ROWS, LENGTHS = 2, {"source": 3, "target": 2}  # of the batch that FLOPs are counted on


@functools.cache
def check_cost(config: Config) -> None:
    """Traces the initialisation of a model, with its forward pass, and counts its parameters and its matrix products.

    Raises:
      UserError: the formulas give other numbers.
    """
    if isinstance(config, EncoderConfig):  # neighbourhoods are counted exactly, but computed by blocks
        config = dataclasses.replace(config, neighbourhood=0)
    longest = most_positions(config) or max(LENGTHS.values())
    lengths = {side: min(length, longest) for side, length in LENGTHS.items()}
    sides = [jax.ShapeDtypeStruct((ROWS, lengths[side]), np.int32) for side in kind_of(config).reads]
    trace = jax.make_jaxpr(make_model(config).init, return_shape=True)
    program, variables = trace(jax.random.key(0), *sides)

    counted = {part: count for part, count in count_parameters(config).items() if count}
    actual = parameters_by_part(variables["params"], config)
    flops = sum(forward_flops(config, *(np.full(ROWS, length) for length in lengths.values())).values())
    actual_flops = product_flops(program.jaxpr)
    differences = [
        f"{part}: {counted.get(part, 0):,} parameters by the formula, {actual.get(part, 0):,} in the model"
        for part in dict.fromkeys([*counted, *actual])
        if counted.get(part) != actual.get(part)
    ]
    if flops != actual_flops:
        differences.append(
            f"forward pass of {ROWS} pairs of {lengths['source']} and {lengths['target']} tokens: {flops:,} FLOPs "
            f"by the formula, {actual_flops:,} in the matrix products of the model"
        )
    if differences:
        raise UserError(
            f"the formulas of transformer_flax/model/flops.py do not fit the model ({'; '.join(differences)}); correct "
            "them, as parameters, FLOPs and MFU are reported from them"
        )


def parameters_by_part(params: Any, config: Config) -> dict[str, int]:
    """Parameters in a tree, by the parts of `count_parameters`."""
    head = "decoder" if "target" in kind_of(config).reads else "classifier"  # of what is in no stack
    parts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[0].key  # encoder_0, decoder_norm, source_embedding, positions, pooling, output, ...
        part = "embeddings" if name.endswith("embedding") else name.split("_")[0]
        part = part if part in ("embeddings", "positions", "encoder") else head
        parts[part] = parts.get(part, 0) + math.prod(leaf.shape)
    return parts


def product_flops(program: Any) -> int:
    """Floating-point operations of all matrix products and convolutions in a jaxpr."""
    total = 0
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)
        if equation.primitive.name == "conv_general_dilated":
            kernel, outputs = equation.invars[1].aval.shape, equation.params["dimension_numbers"].rhs_spec[0]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[outputs]
        inner = [getattr(param, "jaxpr", param) for param in equation.params.values()]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(product_flops(each) for each in inner if isinstance(each, jax.extend.core.Jaxpr))
        total += max((product_flops(branch.jaxpr) for branch in equation.params.get("branches", ())), default=0)
    return total

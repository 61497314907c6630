"""Writes a Transformer as a model of CTranslate2, a C++ library for serving models, also in int8."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_flax.errors import UserError
from transformer_flax.model.config import DEEP_STARTS, ModelConfig, TransformerConfig
from transformer_flax.model.layers import LAYER_NORM_EPSILON
from transformer_flax.model.positions import Positions
from transformer_flax.special_tokens import BEGIN_ID, END_ID, PAD_ID

SUPPORTED_POSITIONS = ("sinusoidal", "sinusoidal_concatenated", "learned")  # not those that the model gets later
NUM_POSITIONS = 4_096  # positions in the stored table of sinusoids
# Fields that need not have their default: each has a check of its own below, or changes no result.
KNOWN = ("compatibility", "clip_distance", "branch_init", "start", "attention_implementation")


def require_supported(config: ModelConfig) -> None:
    """Checks that CTranslate2 can run a model with this config."""
    if type(config) is not TransformerConfig:  # a kind may have a subclass of it
        raise UserError("CTranslate2 runs Transformers alone: config.model.kind must be 'transformer'")
    c = config
    added = [field for field in dataclasses.fields(c) if field.default is not dataclasses.MISSING]
    for name, fits, requirement in (
        *((f.name, getattr(c, f.name) == f.default, repr(f.default)) for f in added if f.name not in KNOWN),
        ("positions", c.positions in SUPPORTED_POSITIONS, f"one of {', '.join(SUPPORTED_POSITIONS)}"),
        ("compatibility", c.compatibility == "scaled_dot", "scaled_dot"),
        ("start", c.start not in DEEP_STARTS, "xavier or fairseq, which leave residuals and LayerNorm as they are"),
        ("d_k", c.d_k * c.num_heads == c.d_model, f"d_model / num_heads, {c.d_model / c.num_heads:g}"),
        ("d_v", c.d_v * c.num_heads == c.d_model, f"d_model / num_heads, {c.d_model / c.num_heads:g}"),
    ):
        if not fits:
            raise UserError(
                f"CTranslate2 cannot run this model: config.model.{name} is {getattr(c, name)!r}, and must be "
                f"{requirement}; export it with --format=safetensors"
            )


def save(config: TransformerConfig, params: Any, vocabulary: Sequence[str], folder: pathlib.Path) -> None:
    """Writes a model in float32. `ctranslate2.Translator(folder, compute_type="int8")` shrinks it while loading.

    `vocabulary` has the pieces in the order of their ids; CTranslate2 reads and returns these pieces. `folder` must
    exist and be empty.
    """
    require_supported(config)
    try:
        from ctranslate2.specs import TransformerSpec, common_spec
    except ImportError as error:
        raise UserError('CTranslate2 is not installed: pip install -e ".[ctranslate2]"') from error

    c = config
    spec: Any = TransformerSpec.from_config(
        c.num_layers, c.num_heads, pre_norm=c.pre_norm, activation=common_spec.Activation.RELU
    )
    # With `disable_unk`, the library never outputs the unknown token. Here the unknown token is padding.
    spec.config.unk_token = vocabulary[PAD_ID]
    spec.config.bos_token = spec.config.decoder_start_token = vocabulary[BEGIN_ID]
    spec.config.eos_token = vocabulary[END_ID]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = LAYER_NORM_EPSILON
    spec.register_source_vocabulary([*vocabulary])
    spec.register_target_vocabulary([*vocabulary])

    length = c.max_length if c.positions == "learned" else NUM_POSITIONS
    positions = np.asarray(Positions(c).apply({"params": params.get("positions", {})}, length))
    shared = params.get("embedding")
    parts = {"source": spec.encoder.embeddings[0], "target": spec.decoder.embeddings, "output": spec.decoder.projection}
    for name, part in parts.items():
        part.weight = np.asarray((shared or params[f"{name}_embedding"])["embedding"])
    for side in ("encoder", "decoder"):
        stack = getattr(spec, side)
        stack.position_encodings.encodings = positions
        if c.pre_norm:
            _set_norm(stack.layer_norm, params[f"{side}_norm"])
        for number, layer in enumerate(stack.layer):
            ours = params[f"{side}_{number}"]
            _set_attention(layer.self_attention, ours["self_attention"], ("query", "key", "value"))
            _set_norm(layer.self_attention.layer_norm, ours["after_self_attention"]["norm"])
            if side == "decoder":
                _set_attention(layer.attention, ours["cross_attention"], ("query",), ("key", "value"))
                _set_norm(layer.attention.layer_norm, ours["after_cross_attention"]["norm"])
            _set_linear(layer.ffn.linear_0, [ours["feed_forward"]["w_1"]])
            _set_linear(layer.ffn.linear_1, [ours["feed_forward"]["w_2"]])
            _set_norm(layer.ffn.layer_norm, ours["after_feed_forward"]["norm"])
    spec.validate()
    spec.optimize(quantization="float32")
    spec.save(str(folder))


def _set_attention(spec: Any, ours: Any, *projections: tuple[str, ...]) -> None:
    """Sets the projections and then W^O. The projections of one tuple become one matrix."""
    *first, last = spec.linear[: len(projections) + 1]
    for linear, names in zip(first, projections, strict=True):
        _set_linear(linear, [ours[name] for name in names])
    _set_linear(last, [ours["output"]], inputs=2)


def _set_linear(spec: Any, ours: Sequence[Any], inputs: int = 1) -> None:
    """Sets a matrix [outputs, inputs] to several of our matrices, stacked along the outputs.

    The first `inputs` axes of our kernels are inputs.
    """
    kernels = [np.asarray(each["kernel"]) for each in ours]
    spec.weight = np.concatenate([kernel.reshape(np.prod(kernel.shape[:inputs]), -1).T for kernel in kernels])
    if "bias" in ours[0]:
        spec.bias = np.concatenate([np.asarray(each["bias"]).reshape(-1) for each in ours])


def _set_norm(spec: Any, ours: Any) -> None:
    spec.gamma, spec.beta = np.asarray(ours["scale"]), np.asarray(ours["bias"])

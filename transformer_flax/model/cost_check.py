"""Checks the formulas of `cost` against the initialised model."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.extend
import numpy as np

from transformer_flax.errors import UserError
from transformer_flax.model.config import EncoderConfig
from transformer_flax.model.cost import count_parameters, forward_flops
from transformer_flax.model.kinds import Config, kind_of, make_model, most_positions

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
            f"the formulas of transformer_flax/model/cost.py do not fit the model ({'; '.join(differences)}); correct "
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

import dataclasses
import math

import jax
import numpy as np
import pytest

from tests.conftest import TINY, VARIANTS
from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.cost import count_parameters, training_flops
from transformer_flax.model.transformer import Transformer, init_params
from transformer_flax.special_tokens import NUM_SPECIAL

CONFIGS = {
    **VARIANTS,
    # Every choice at once: each adds its own parameters to those of the others.
    "all": dataclasses.replace(
        TINY, num_layers=3, positions="learned", pre_norm=True, tie_embeddings=False, attention_bias=True
    ),
}


def part_of(path) -> str:
    name = path[0].key  # encoder_0, decoder_norm, source_embedding, positions, ...
    return "embeddings" if name.endswith("embedding") else name.split("_")[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_count_is_the_number_of_parameters_in_every_part(config: TransformerConfig):
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    actual = {"positions": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        actual[part_of(path)] = actual.get(part_of(path), 0) + math.prod(leaf.shape)
    assert count_parameters(config) == actual


def test_base_and_big_model_have_the_papers_number_of_parameters():
    base = dataclasses.replace(
        TINY, vocab_size=37_000, num_layers=6, d_model=512, d_ff=2048, num_heads=8, d_k=64, d_v=64
    )
    # attention 512 * 8 * 256 = 1,048,576; FFN 2 * 512 * 2048 + 2048 + 512 = 2,099,712; LayerNorm 1,024
    # encoder layer 3,150,336; decoder layer 4,199,936; six of both 44,101,632; embeddings 18,944,000
    assert sum(count_parameters(base).values()) == 63_045_632
    big = count_parameters(dataclasses.replace(base, d_model=1024, d_ff=4096, num_heads=16))
    # attention 4,194,304; FFN 8,393,728; LayerNorm 2,048; so 6 * (12,592,128 + 16,788,480)
    assert big["encoder"] + big["decoder"] == 176_283_648


def products(jaxpr) -> int:
    """Floating-point operations of all matrix products in a program."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)
        inner = [param for param in equation.params.values() if hasattr(param, "jaxpr")]
        total += sum(products(closed.jaxpr) for closed in inner)
    return total


def test_training_flops_are_those_of_the_products_in_the_program():
    config = dataclasses.replace(TINY, d_k=6, d_v=10, vocab_size=37)
    source, target = (np.full((3, length), NUM_SPECIAL, np.int32) for length in (5, 7))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def gradient(params):
        return jax.grad(lambda params: Transformer(config).apply({"params": params}, source, target).sum())(params)

    counted = products(jax.make_jaxpr(gradient)(params).jaxpr)
    assert training_flops(config, np.full(3, 5), np.full(3, 7)) == counted

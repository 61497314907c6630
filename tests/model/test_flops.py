import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import TINY, VARIANTS
from transformer_flax.errors import UserError
from transformer_flax.model import transformer
from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.flops import (
    activation_bytes,
    check_cost,
    count_modules,
    count_parameters,
    forward_flops,
    product_flops,
    training_flops,
)
from transformer_flax.model.registry import init_params
from transformer_flax.model.transformer import FeedForward, Transformer
from transformer_flax.special_tokens import NUM_SPECIAL
from transformer_flax.training.loss import translation_loss

CONFIGS = {
    **VARIANTS,
    # Every choice at once: each adds its own parameters to those of the others.
    "all": dataclasses.replace(
        TINY, num_layers=3, positions="learned", pre_norm=True, tie_embeddings=False, attention_bias=True
    ),
    "all others": dataclasses.replace(TINY, num_layers=3, positions="relative", compatibility="additive"),
}


def part_of(path) -> str:
    name = path[0].key  # encoder_0, decoder_norm, source_embedding, positions, ...
    return "embeddings" if name.endswith("embedding") else name.split("_")[0]


SUBLAYERS = {  # as count_modules calls them
    "self_attention": "self-attention",
    "cross_attention": "cross-attention",
    "feed_forward": "feed-forward",
    "after_self_attention": "LayerNorm",
    "after_cross_attention": "LayerNorm",
    "after_feed_forward": "LayerNorm",
}


def module_of(path) -> str:
    """That of a leaf of the parameters, by its path: encoder_0/feed_forward/..., decoder_norm/..., positions/..."""
    names = [part.key for part in path]
    if names[0].endswith("embedding"):
        return "embeddings"
    if names[0].endswith("_norm"):
        return f"{names[0].split('_')[0]} LayerNorm"
    return f"{names[0].split('_')[0]} {SUBLAYERS[names[1]]}" if "coder" in names[0] else names[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_count_is_the_number_of_parameters_in_every_module(config: TransformerConfig):
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    actual = {"positions": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        actual[module_of(path)] = actual.get(module_of(path), 0) + math.prod(leaf.shape)
    assert count_modules(config) == actual
    assert sum(count_parameters(config).values()) == sum(actual.values())
    assert set(count_parameters(config)) == {"embeddings", "positions", "encoder", "decoder"}


OTHERWISE = {
    "one position": {"positions": "learned", "max_length": 1},
    "neighbourhood of one": {"neighbourhood": 1},
    "neighbourhood": {"neighbourhood": 3},
    "scanned": {"scan_layers": True, "remat": "layers"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), *(dataclasses.replace(TINY, **fields) for fields in OTHERWISE.values())]
)
def test_the_formulas_fit_the_model_that_is_built(config):
    check_cost(config)


class ThirdMatrix(FeedForward):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.config.d_model, name="w_3")(super().__call__(x))


class ThirdProduct(FeedForward):
    def __call__(self, x):
        return super().__call__(x) @ jnp.eye(self.config.d_model)


def test_a_model_with_more_than_the_formulas_count_is_refused(monkeypatch):
    # 3 layers in each stack, each with 16 x 16 + 16 parameters more; 2 pairs of 3 and 2 tokens.
    config = dataclasses.replace(TINY, num_layers=3)
    parts, flops = count_parameters(config), sum(forward_flops(config, np.full(2, 3), np.full(2, 2)).values())
    check_cost.cache_clear()
    monkeypatch.setattr(transformer, "FeedForward", ThirdMatrix)
    with pytest.raises(UserError) as error:
        check_cost(config)
    for part in ("encoder", "decoder"):
        assert f"{part}: {parts[part]:,} parameters by the formula, {parts[part] + 816:,} in the mo" in str(error.value)
    more = 2 * 3 * (2 * 3 + 2 * 2) * 16 * 16
    assert f"{flops:,} FLOPs by the formula, {flops + more:,} in the matrix products" in str(error.value)
    assert "embeddings" not in str(error.value)

    monkeypatch.setattr(transformer, "FeedForward", ThirdProduct)
    with pytest.raises(UserError, match="FLOPs by the formula") as error:
        check_cost(config)
    assert "parameters by" not in str(error.value)


BASE = dataclasses.replace(TINY, vocab_size=37_000, num_layers=6, d_model=512, d_ff=2048, num_heads=8, d_k=64, d_v=64)


def test_base_and_big_model_have_the_papers_number_of_parameters():
    # attention 512 * 8 * 256 = 1,048,576; FFN 2 * 512 * 2048 + 2048 + 512 = 2,099,712; LayerNorm 1,024
    # encoder layer 3,150,336; decoder layer 4,199,936; six of both 44,101,632; embeddings 18,944,000
    assert sum(count_parameters(BASE).values()) == 63_045_632
    big = count_parameters(dataclasses.replace(BASE, d_model=1024, d_ff=4096, num_heads=16))
    # attention 4,194,304; FFN 8,393,728; LayerNorm 2,048; so 6 * (12,592,128 + 16,788,480)
    assert big["encoder"] + big["decoder"] == 176_283_648


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"compatibility": "additive"},
        {"positions": "relative"},
        {"positions": "relative", "compatibility": "additive"},
    ],
)
def test_training_flops_are_those_of_the_products_in_the_program(choices):
    config = dataclasses.replace(TINY, d_k=6, d_v=10, vocab_size=37, **choices)
    source, target = (np.full((3, length), NUM_SPECIAL, np.int32) for length in (5, 7))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def gradient(params):
        return jax.grad(lambda params: Transformer(config).apply({"params": params}, source, target).sum())(params)

    counted = product_flops(jax.make_jaxpr(gradient)(params).jaxpr)
    assert training_flops(config, np.full(3, 5), np.full(3, 7)) == counted


def abstract(config, rows, source, target):
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return params, *(jax.ShapeDtypeStruct((rows, length), np.int32) for length in (source, target))


def training_loss(config, *, dropout=False):
    loss_fn = translation_loss(Transformer(config), 0.1)
    key = jax.random.key(0) if dropout else None
    return lambda params, source, target: loss_fn(params, {"source": source, "target": target}, key)[0]["loss"]


def test_flops_of_the_base_model_are_those_that_xla_counts():
    # XLA counts what is element by element too, so a little more.
    config, rows, source, target = dataclasses.replace(BASE, dropout=0.0), 8, 32, 28
    lengths = np.full(rows, source), np.full(rows, target)
    arguments, loss = abstract(config, rows, source, target), training_loss(config)
    forward = jax.jit(loss).lower(*arguments).cost_analysis()["flops"]
    assert sum(forward_flops(config, *lengths).values()) == pytest.approx(forward, rel=0.02)
    update = jax.jit(jax.grad(loss)).lower(*arguments).cost_analysis()["flops"]
    assert training_flops(config, *lengths) == pytest.approx(update, rel=0.02)


def test_activations_are_what_differentiation_keeps():
    config = dataclasses.replace(TINY, num_layers=1, num_heads=4, d_k=8, d_v=8, d_model=32, d_ff=128, vocab_size=101)
    few, many = (activation_bytes(config, rows, 16, 16) for rows in (8, 16))
    assert many == pytest.approx(2 * few, rel=0.01)
    tokens = 2 * 16 * 16
    # At the least, what the inner product of the feed-forward gives and what the ReLU makes of it, and the logits.
    assert many > tokens * 2 * 4 * config.d_ff + tokens / 2 * 4 * config.vocab_size
    assert activation_bytes(dataclasses.replace(config, remat="layers"), 16, 16, 16) < many / 2
    in_chunks = activation_bytes(config, 16, 16, 16, loss_chunks=4)
    assert many - in_chunks == 3 / 4 * tokens / 2 * 4 * config.vocab_size


def test_activations_are_about_the_room_that_xla_takes():
    config = dataclasses.replace(TINY, num_heads=4, d_k=16, d_v=16, d_model=64, d_ff=256, vocab_size=1000)
    rows = 16
    arguments = abstract(config, rows, 16, 16)
    compiled = jax.jit(jax.grad(training_loss(config, dropout=True))).lower(*arguments).compile()
    room = compiled.memory_analysis().temp_size_in_bytes
    assert room == pytest.approx(activation_bytes(config, rows, 16, 16), rel=0.25)

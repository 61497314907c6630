"""Relative and rotary positions: self-attention knows how far apart words stand, and nothing knows where."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import TINY, VARIANTS
from tests.model.parameters import random_params
from tests.model.sentences import SOURCE, TARGET, B, K, T, logits_of
from tests.model.test_transformer import decode_stepwise
from transformer_flax.model.attention import MultiHeadAttention
from transformer_flax.model.config import DISTANCES
from transformer_flax.model.positions import distances_between, rotate, sinusoids
from transformer_flax.model.transformer import Transformer, shift_right

RELATIVE = dataclasses.replace(TINY, positions="relative")
KINDS = {"relative": RELATIVE, **{name: config for name, config in VARIANTS.items() if config.positions in DISTANCES}}


def test_distances_are_those_of_keys_from_queries():
    np.testing.assert_array_equal(distances_between(3, 3), [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]])
    np.testing.assert_array_equal(
        distances_between(2, 6), [[-2, -1, 0, 1, 2, 3], [-3, -2, -1, 0, 1, 2]]
    )  # a block and its two


def test_turning_is_what_multiplying_with_complex_numbers_is():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 9, 3, 8))
    frequencies = 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * np.arange(9)[:, None] * frequencies)[:, None]
    ours = rotate(jnp.array(x, jnp.float32), sinusoids(9, 8))
    np.testing.assert_allclose(ours[..., 0::2], turned.real, atol=1e-5)
    np.testing.assert_allclose(ours[..., 1::2], turned.imag, atol=1e-5)
    # As a step of decoding turns what stands at one position.
    step = rotate(jnp.array(x[:, 4:5], jnp.float32), sinusoids(9, 8)[4:5])
    np.testing.assert_allclose(step, ours[:, 4:5], atol=1e-6)


def test_products_of_what_is_turned_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    query, key = (jnp.tile(rng.normal(size=8).astype(np.float32), (1, 30, 1, 1)) for _ in range(2))  # one everywhere
    turns = sinusoids(30, 8)
    products = np.einsum("pd,qd->pq", rotate(query, turns)[0, :, 0], rotate(key, turns)[0, :, 0])
    for distance in range(-29, 30):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert products[0, 0] == pytest.approx(float(query[0, 0, 0] @ key[0, 0, 0]), abs=1e-5)
    assert len({round(float(product), 3) for product in products[0]}) > 25


def test_relative_attention_is_to_keys_moved_by_their_clipped_distance():
    config = dataclasses.replace(RELATIVE, clip_distance=2)
    params = random_params(config)["encoder_0"]["self_attention"]
    x = np.random.default_rng(1).normal(size=(1, 7, config.d_model)).astype(np.float32)
    mask = np.array([1, 1, 1, 1, 1, 1, 0], bool)[None, None, None]
    ours = MultiHeadAttention(config, to_itself=True).apply({"params": params}, x, x, mask)

    p = {name: np.asarray(part["kernel"], np.float64) for name, part in params.items() if "kernel" in part}
    table = params["distances"]["table"]  # of -2, -1, 0, 1, 2
    expected = np.zeros((7, config.d_model))
    for i in range(7):
        for h in range(config.num_heads):
            query = x[0, i] @ p["query"][:, h]
            keys = [x[0, j] @ p["key"][:, h] + table[min(max(j - i, -2), 2) + 2] for j in range(6)]
            scores = np.exp([query @ key / np.sqrt(config.d_k) for key in keys])
            expected[i] += scores / scores.sum() @ (x[0, :6] @ p["value"][:, h]) @ p["output"][h]
    np.testing.assert_allclose(ours[0], expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_where_a_sentence_stands_changes_nothing_but_the_order_of_its_words_does(kind):
    config = dataclasses.replace(KINDS[kind], num_layers=1)
    later = np.pad(SOURCE, ((0, 0), (4, 0)))  # behind padding
    logits = logits_of(config)
    np.testing.assert_allclose(logits_of(config, later), logits, atol=1e-5)  # so cross-attention has no positions
    assert np.abs(logits_of(config, SOURCE[:, [1, 0, 2, 3, 4, 5, 6]]) - logits).max() > 0.05
    absolute = dataclasses.replace(TINY, num_layers=1)
    assert np.abs(logits_of(absolute, later) - logits_of(absolute)).max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_within_neighbourhoods_distances_are_the_same(kind):
    near = dataclasses.replace(KINDS[kind], num_layers=1, neighbourhood=4)  # the source in blocks of two
    in_blocks = logits_of(near)
    whole = jax.jit(functools.partial(Transformer(near).apply, mutable=["intermediates"]))
    in_one_piece, _ = whole({"params": random_params(near)}, SOURCE, TARGET)
    np.testing.assert_allclose(in_blocks, in_one_piece, atol=1e-5)
    assert np.abs(in_blocks - logits_of(dataclasses.replace(near, neighbourhood=0))).max() > 0.1
    inputs = np.asarray(shift_right(TARGET)).reshape(B, K, T)
    np.testing.assert_allclose(decode_stepwise(near, inputs), in_blocks.reshape(B, K, T, -1), atol=1e-5)

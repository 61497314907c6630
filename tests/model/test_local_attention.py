"""Restricted self-attention: in blocks it is what it is under a mask, and no farther away is anything seen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import TINY
from tests.model.parameters import random_params
from tests.model.sentences import SOURCE, TARGET, B, K, T, logits_of
from tests.model.test_transformer import decode_stepwise
from transformer_flax.model.attention import attention_weights, causal_mask
from transformer_flax.model.flops import forward_flops
from transformer_flax.model.local_attention import attend_locally, local_mask
from transformer_flax.model.registry import attention_maps
from transformer_flax.model.transformer import Transformer, shift_right

FAR = dataclasses.replace(TINY, num_layers=1)
NEAR = dataclasses.replace(FAR, neighbourhood=4)


def test_a_neighbourhood_is_centred_around_its_query():
    expected = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    np.testing.assert_array_equal(local_mask(4, 2)[0, 0], expected)
    np.testing.assert_array_equal(local_mask(4, 3)[0, 0], expected)
    np.testing.assert_array_equal(local_mask(3, 1)[0, 0], np.eye(3))


def attend(query, key, value, mask):
    return jnp.einsum("bhqm,bmhv->bqhv", attention_weights(query, key, mask), value)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "r"), [(13, 1), (13, 4), (12, 7), (6, 4), (5, 100)])
def test_blocks_give_what_the_mask_gives(length, r, causal):
    rng = np.random.default_rng(length)
    query, key = (rng.normal(size=(2, length, 3, 4)).astype(np.float32) for _ in range(2))
    value = rng.normal(size=(2, length, 3, 5)).astype(np.float32)
    mask = np.ones((2, 1, 1, length), bool)
    mask[1, ..., -3:] = False  # padding, so that some rows see nothing

    @jax.jit
    def both(query, key, value, mask):
        mask = mask & causal_mask(length) if causal else mask
        in_blocks = attend_locally(attend, query, key, value, mask, r)
        return in_blocks, attend(query, key, value, mask & local_mask(length, r))

    np.testing.assert_allclose(*both(query, key, value, mask), atol=1e-5)


def test_blocks_are_all_that_is_computed():
    # No array of the program has length x length elements.
    length, r = 256, 8
    x = jax.ShapeDtypeStruct((1, length, 1, 4), np.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 1, length), bool)
    program = jax.make_jaxpr(lambda x, mask: attend_locally(attend, x, x, x, mask, r))(x, mask)
    largest = max(variable.aval.size for equation in program.eqns for variable in equation.outvars)
    assert largest <= 4 * length * 3 * r


def test_whoever_looks_sees_the_same_model_with_its_weights_in_one_piece():
    params, logits = random_params(NEAR), logits_of(NEAR)
    look = jax.jit(functools.partial(Transformer(NEAR).apply, mutable=["intermediates"]))
    looked_at, _ = look({"params": params}, SOURCE, TARGET)
    np.testing.assert_allclose(logits, looked_at, atol=1e-4)
    assert np.abs(logits - logits_of(FAR)).max() > 0.1
    maps = attention_maps(NEAR, params, SOURCE, TARGET)
    for kind, length in (("encoder", SOURCE.shape[1]), ("decoder", TARGET.shape[1])):
        seen = np.asarray(maps[kind]).max(axis=(0, 1, 2)) > 0
        expected = np.asarray(local_mask(length, 4)[0, 0])
        np.testing.assert_array_equal(seen, np.tril(expected) if kind == "decoder" else expected)
    assert (np.asarray(maps["cross"])[:, 0] > 0).all()  # which is not restricted


def test_what_it_costs_grows_with_the_length():
    def pairs(config, length):
        flops = forward_flops(config, np.array([length]), np.array([length]))["encoder/self_attention"]
        return flops - 2 * config.num_layers * length * 2 * config.d_model * config.num_heads * (
            config.d_k + config.d_v
        )

    assert pairs(NEAR, 64) == pairs(FAR, 64) * 5 / 64
    assert pairs(NEAR, 4) == pairs(FAR, 4)


def test_decoding_stepwise_gives_the_logits_of_the_whole_target_at_once():
    near = dataclasses.replace(FAR, neighbourhood=2)  # in blocks here, of one position each
    inputs = np.asarray(shift_right(TARGET)).reshape(B, K, T)
    np.testing.assert_allclose(decode_stepwise(near, inputs), logits_of(near).reshape(B, K, T, -1), atol=1e-5)

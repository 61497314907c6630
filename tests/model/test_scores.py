"""Attention scores follow their equations: the paper's scaled product, the unscaled product and the additive score."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import TINY
from tests.model.parameters import random_params
from tests.model.sentences import SOURCE, TARGET, compiled, logits_of
from transformer_flax.model.attention import MultiHeadAttention, attend_to_cache, attention_weights, causal_mask
from transformer_flax.model.scores import Additive, Dot
from transformer_flax.model.transformer import Transformer

B, Q, M, H, D_K = 2, 4, 5, 3, 6
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.normal(size=shape) for shape in ((B, Q, H, D_K), (B, M, H, D_K), (B, M, H, 7)))
NO_OFFSETS = np.zeros((Q, M, D_K))
OFFSETS, V = RNG.normal(size=(Q, M, D_K)), RNG.normal(size=(H, D_K))
SCORES = {"scaled_dot": Dot(), "dot": Dot(scaled=False), "additive": Additive(jnp.array(V, jnp.float32))}
IN_WORDS = {  # one query, one key, one head; in float64
    "scaled_dot": lambda q, k, v: sum(q * k) / np.sqrt(D_K),
    "dot": lambda q, k, v: sum(q * k),
    "additive": lambda q, k, v: sum(v * np.tanh(q + k)),
}


def expected(name: str, offsets=NO_OFFSETS) -> np.ndarray:
    """One query and key after the other."""
    logits = np.zeros((B, H, Q, M))
    for b, h, q, m in np.ndindex(logits.shape):
        logits[b, h, q, m] = IN_WORDS[name](QUERY[b, q, h], KEY[b, m, h] + offsets[q, m], V[h])
    return logits


def single(*arrays):
    return [jnp.array(array, jnp.float32) for array in arrays]


@pytest.mark.parametrize("name", SCORES)
def test_it_is_that_of_each_query_and_key_for_itself(name):
    query, key, offsets = single(QUERY, KEY, OFFSETS)
    full = SCORES[name].full
    np.testing.assert_allclose(full(query, key), expected(name), atol=1e-5)
    np.testing.assert_allclose(full(query, key, offsets), expected(name, OFFSETS), atol=1e-5)


def test_scores_of_low_precision_are_summed_in_high():
    # In bfloat16, 256 + 1 is 256. One query, one key, one head; tanh is 1.
    ones, key = jnp.ones((1, 1, 1, 2), jnp.bfloat16), jnp.array([[[[256, 1]]]], jnp.bfloat16)
    dot, additive = Dot(scaled=False), Additive(jnp.array([[256.0, 1.0]]))
    assert dot.full(ones, key) == dot.cached(ones, key.transpose(0, 2, 3, 1)) == 257
    assert additive.full(99 * ones, ones) == additive.cached(99 * ones, ones.transpose(0, 2, 3, 1)) == 257


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("queries", [1, Q])
def test_it_is_the_same_in_a_step_of_decoding(name, queries):
    query, key, value = single(QUERY[:, :queries], KEY, VALUE)
    few = SCORES[name].cached(query, key.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(few, expected(name)[:, :, :queries], atol=1e-5)
    mask = RNG.random((B, 1, queries, M)) < 0.6
    looked_up = attend_to_cache(query, key.transpose(0, 2, 3, 1), value.swapaxes(1, 2), mask, SCORES[name])
    weights = attention_weights(query, key, mask, SCORES[name])
    np.testing.assert_allclose(looked_up, jnp.einsum("bhqm,bmhv->bqhv", weights, value), atol=1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_in_half_the_precision_it_is_float32(name):
    query, key, offsets = (x.astype(jnp.bfloat16) for x in single(QUERY, KEY, OFFSETS))
    score = SCORES[name]
    for logits in (
        score.full(query, key, offsets),
        score.cached(query, key.transpose(0, 2, 3, 1)),
        score.cached(query[:, :1], key.transpose(0, 2, 3, 1)),
    ):
        assert logits.dtype == jnp.float32
    np.testing.assert_allclose(score.full(query, key, offsets), expected(name, OFFSETS), atol=0.2)


@pytest.mark.parametrize("name", SCORES)
def test_queries_that_may_see_nothing_have_finite_gradients(name):
    query, key = single(QUERY, KEY)
    mask = causal_mask(M)[:, :, :Q].at[:, :, 0].set(False)

    def loss(query, key):
        weights = attention_weights(query, key, mask, SCORES[name])
        return (weights**2).sum(), weights

    gradients, weights = jax.grad(loss, argnums=(0, 1), has_aux=True)(query, key)
    np.testing.assert_array_equal(weights[:, :, 0], 0)
    np.testing.assert_array_equal(gradients[0][:, 0], 0)
    assert all(np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-4 for gradient in gradients)


def test_without_its_scale_a_product_grows_with_d_k():
    # Section 3.2.1: of independent features of mean 0 and variance 1 it has variance d_k, and scaled variance 1.
    for d_k in (4, 64, 1024):
        query, key = single(*np.random.default_rng(d_k).normal(size=(2, 1, 100, 1, d_k)))
        assert np.var(Dot(scaled=False).full(query, key)) == pytest.approx(d_k, rel=0.1)
        assert np.var(Dot().full(query, key)) == pytest.approx(1, rel=0.1)


def test_all_attention_of_a_model_is_of_the_kind_that_its_config_says():
    config = dataclasses.replace(TINY, num_layers=1, compatibility="additive")

    @jax.jit
    @jax.grad
    def gradient(params):
        return (Transformer(config).apply({"params": params}, SOURCE, TARGET) ** 2).mean()

    gradients = gradient(random_params(config))
    for layer, attention in (("encoder", "self"), ("decoder", "self"), ("decoder", "cross")):
        v = gradients[f"{layer}_0"][f"{attention}_attention"]["v"]
        assert v.shape == (config.num_heads, config.d_k)
        assert np.abs(v).min() > 0


def test_the_weights_of_an_additive_score_start_with_a_length_of_1():
    config = dataclasses.replace(TINY, compatibility="additive", d_k=400)
    x = jnp.ones((1, 1, TINY.d_model))
    params = MultiHeadAttention(config).init(jax.random.key(0), x, x, jnp.ones((1, 1, 1, 1), bool))["params"]
    np.testing.assert_allclose(jnp.linalg.norm(params["v"], axis=-1), 1, atol=0.15)


def test_unscaled_is_as_if_queries_were_longer():
    scaled = dataclasses.replace(TINY, num_layers=1)
    unscaled = dataclasses.replace(scaled, compatibility="dot")
    longer = jax.tree_util.tree_map_with_path(
        lambda path, p: p * np.float32(TINY.d_k**0.5) if "query" in str(path) else p, random_params(scaled)
    )
    expected = compiled(scaled)({"params": longer}, SOURCE, TARGET, rngs=None)
    np.testing.assert_allclose(logits_of(unscaled), expected, atol=1e-4)
    assert np.abs(logits_of(scaled) - expected).max() > 0.1

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import TINY
from transformer_flax.errors import UserError
from transformer_flax.model.attention import (
    MultiHeadAttention,
    ancestor_mask,
    attend_fused,
    attend_to_cache,
    attention_weights,
    causal_mask,
    has_cudnn,
    padding_mask,
)
from transformer_flax.model.scores import Dot

B, Q, M = 2, 4, 5
CONFIGS = {"paper": TINY, "attention_bias": dataclasses.replace(TINY, attention_bias=True)}


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, MEMORY = normal(0, B, Q, TINY.d_model), normal(1, B, M, TINY.d_model)
# Sentence 0 has 3 keys; the others are padding. Sentence 1 has all.
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)[:, None, None, :]
EVEN_MASK = np.pad(MASK, [(0, 0)] * 3 + [(0, 1)])  # one more key, which is padding


def attention_params(config):
    depths = {"query": config.d_k, "key": config.d_k, "value": config.d_v}
    params = {
        name: {"kernel": normal(n, config.d_model, config.num_heads, depth) / 4}
        for n, (name, depth) in enumerate(depths.items())
    }
    params["output"] = {"kernel": normal(3, config.num_heads, config.d_v, config.d_model) / 4}
    if config.attention_bias:
        for n, (name, depth) in enumerate(depths.items()):
            params[name]["bias"] = normal(4 + n, config.num_heads, depth)
        params["output"]["bias"] = normal(7, config.d_model)
    return params


def attend(x, memory, mask, config=TINY):
    return MultiHeadAttention(config).apply({"params": attention_params(config)}, x, memory, mask)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("mask", [EVEN_MASK, causal_mask(M + 1)[:, :, :Q], EVEN_MASK & causal_mask(M + 1)[:, :, :Q]])
def test_attention_in_one_kernel_is_softmax_of_scores_times_values(mask, scaled):
    # On a GPU this is cuDNN's kernel, which needs bfloat16 and an even number of keys.
    dtype, atol = (jnp.bfloat16, 0.03) if has_cudnn(8) else (jnp.float32, 1e-6)
    given = [jnp.asarray(normal(seed, B, length, 3, 8), dtype) for seed, length in [(4, Q), (5, M + 1), (6, M + 1)]]
    query, key, value = (x.astype(jnp.float32) for x in given)
    expected = np.einsum("bhqm,bmhv->bqhv", attention_weights(query, key, mask, Dot(scaled=scaled)), value)
    fused = attend_fused(*given, mask, scaled=scaled).astype(jnp.float32)
    np.testing.assert_allclose(fused, expected, atol=atol)


@pytest.mark.parametrize(
    ("capability", "largest"),
    [("9.0", 256), ("10.0", 256), ("8.0", 128), ("7.5", 0), ("gfx90a", 0), (None, 0)],
)
def test_nvidias_gpus_from_the_a100_on_have_that_kernel_for_heads_up_to_a_size(monkeypatch, capability, largest):
    said = {} if capability is None else {"compute_capability": capability}
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**said)])
    assert [has_cudnn(d_k) for d_k in (128, 136, 256)] == [largest >= 128, largest == 256, largest == 256]


def test_weights_are_seen_where_a_kernel_would_keep_them():
    plain = dataclasses.replace(TINY, d_k=8, d_v=8, dtype="bfloat16")
    fused = dataclasses.replace(plain, attention_implementation="cudnn")

    def look(config, **kwargs):
        return MultiHeadAttention(config).apply({"params": attention_params(config)}, X, MEMORY, MASK, **kwargs)

    output, seen = look(plain, mutable=["intermediates"])
    again, weights = look(fused, mutable=["intermediates"])
    np.testing.assert_array_equal(again, output)
    np.testing.assert_array_equal(*jax.tree.leaves([seen, weights]))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (look(fused), output)), atol=0.05)


def test_attention_in_one_kernel_is_that_of_every_variant_or_is_refused(variant):
    plain = dataclasses.replace(variant, d_k=8, d_v=8, dtype="bfloat16")
    try:
        fused = dataclasses.replace(plain, attention_implementation="cudnn")
    except UserError:  # the kernel cannot compute it
        return
    attentions = [MultiHeadAttention(config, to_itself=True) for config in (plain, fused)]
    params = attentions[0].init(jax.random.key(0), X, X, causal_mask(Q))["params"]
    outputs = [attention.apply({"params": params}, X, X, causal_mask(Q)) for attention in attentions]
    np.testing.assert_allclose(*(np.asarray(output, np.float32) for output in outputs), atol=0.05)


def test_padding_mask_is_over_keys():
    np.testing.assert_array_equal(padding_mask(jnp.array([[5, 2, 0], [4, 6, 2]])), [[[[1, 1, 0]]], [[[1, 1, 1]]]])


def test_causal_mask_lets_a_position_see_itself_and_what_is_before():
    np.testing.assert_array_equal(causal_mask(3), [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]])


def test_ancestor_mask_lets_a_hypothesis_see_what_its_ancestors_wrote():
    # Two sentences with two hypotheses each and room for three positions, of which two have been written. In the first,
    # both went on from what hypothesis 1 wrote at position 0; in the second, they were exchanged. At position 2 nothing
    # stands yet, whatever its ancestors are said to be.
    ancestors = jnp.array([[[1, 0, 0], [1, 1, 0]], [[1, 0, 1], [0, 1, 1]]])
    expected = [
        # by hypothesis 0 at 0, 1, 2; by hypothesis 1 at 0, 1, 2
        [[[0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0]]],
        [[[0, 1, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0]]],
    ]
    np.testing.assert_array_equal(ancestor_mask(ancestors, jnp.int32(1)), expected)


def test_ancestor_mask_of_one_hypothesis_is_causal():
    ancestors = jnp.zeros((1, 1, 4), jnp.int32)
    rows = [ancestor_mask(ancestors, position)[0, 0, 0] for position in jnp.arange(4)]
    np.testing.assert_array_equal(rows, causal_mask(4)[0, 0])


def test_weights_are_the_softmax_worked_out_by_hand():
    # d_k 4: the products 2 ln 3, 0 and 2 ln 5 over sqrt(4) are ln 3, 0 and ln 5, with exponentials 3, 1 and 5.
    query = jnp.array([2.0, 0, 0, 0]).reshape(1, 1, 1, 4)
    key = jnp.array([[np.log(3), 7, 7, 7], [0, 7, 7, 7], [np.log(5), 7, 7, 7]]).reshape(1, 3, 1, 4)
    everything, not_the_last = jnp.array([True, True, True]), jnp.array([True, True, False])
    np.testing.assert_allclose(attention_weights(query, key, everything)[0, 0, 0], [3 / 9, 1 / 9, 5 / 9], rtol=1e-6)
    np.testing.assert_allclose(attention_weights(query, key, not_the_last)[0, 0, 0], [3 / 4, 1 / 4, 0], rtol=1e-6)


def test_weights_sum_to_one_and_are_exactly_zero_where_masked():
    mask = causal_mask(M) & MASK
    # Products of hundreds: a mask of moderate size, such as -1e4 or -1e-9, would let something through.
    query, key = 30 * normal(2, B, M, 3, 4), 30 * normal(3, B, M, 3, 4)
    weights = attention_weights(query, key, mask)
    assert weights.shape == (B, 3, M, M)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    assert (np.asarray(weights)[~np.broadcast_to(mask, weights.shape)] == 0).all()


def test_weights_are_float32_whatever_their_inputs_are():
    query, key = normal(2, B, Q, 3, 4), normal(3, B, M, 3, 4)
    weights = attention_weights(query.astype(jnp.bfloat16), key.astype(jnp.bfloat16), MASK)
    assert weights.dtype == jnp.float32
    # Eight bits of a bfloat16 could not make them sum to one as closely.
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


def over_devices(f):
    mesh = jax.make_mesh((len(jax.devices()),), ("sentences",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("sentences")
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_looking_up_gives_the_values_by_their_weights(dtype, tolerance):
    # 5 queries, 7 keys of depth 4 and values of depth 6, 3 heads: no two axes can be taken for one another.
    query, key, value = (x.astype(dtype) for x in (normal(2, B, 5, 3, 4), normal(3, B, 7, 3, 4), normal(4, B, 7, 3, 6)))
    mask = np.random.default_rng(5).random((B, 1, 5, 7)) < 0.5
    mask[1, 0, 2] = False
    looked_up = jax.jit(attend_to_cache)(query, key.transpose(0, 2, 3, 1), value.swapaxes(1, 2), mask)
    expected = jnp.einsum("bhqm,bmhv->bqhv", attention_weights(query, key, mask), value)
    assert (looked_up.shape, looked_up.dtype) == ((B, 5, 3, 6), dtype)
    np.testing.assert_allclose(looked_up.astype(np.float32), expected, atol=tolerance)
    np.testing.assert_array_equal(looked_up[1, 2], 0)  # nothing allowed


@pytest.mark.parametrize(
    ("platform", "products", "in_float32"), [("cpu", 0, True), ("cuda", 2, False), ("tpu", 2, False)]
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap, over_devices], ids=["jit", "vmap", "shard_map"])
def test_only_a_cpu_looks_up_by_sums_of_products_for_which_it_copies_the_cache(
    transform, platform, products, in_float32
):
    rows, hypotheses, heads, depth, length = 8, 5, 3, 4, 7
    query, key, value = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((rows, hypotheses, heads, depth), (rows, heads, depth, length), (rows, heads, length, depth))
    )
    arguments = (query, key, value, jax.ShapeDtypeStruct((rows, 1, hypotheses, length), bool))
    if transform is jax.vmap:
        arguments = jax.tree.map(lambda x: x.update(shape=(1, *x.shape)), arguments)
    program = jax.jit(transform(attend_to_cache)).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    assert program.count("stablehlo.dot_general") == products
    assert ("x4x7xf32>" in program) == in_float32  # the keys
    assert ("x7x4xf32>" in program) == in_float32  # the values


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_step_writes_slices_of_the_cache_and_scatters_nothing(platform):
    attention, length = MultiHeadAttention(TINY, to_itself=True), 7
    params = {"params": attention_params(TINY)}
    _, cache = attention.apply(params, B, Q, length, method="init_cache", mutable=["cache"])

    def step(cache, position):
        mask = np.ones((B, 1, Q, Q * length), bool)
        return attention.apply(params | cache, X, position, mask, method="decode_step", mutable=["cache"])

    program = jax.jit(step).trace(cache, 0).lower(lowering_platforms=(platform,)).as_text()
    assert program.count("stablehlo.dynamic_update_slice") == 2
    assert "stablehlo.scatter" not in program


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_heads_attend_each_on_its_own(config):
    # A plain loop over sentences, heads and queries, which cannot mix heads with positions or features.
    p = attention_params(config)
    bias = {name: part.get("bias", 0 * part["kernel"][0]) for name, part in p.items()}
    expected = np.zeros((B, Q, config.d_model))
    for b in range(B):
        keys = MEMORY[b][MASK[b, 0, 0]]
        for q in range(Q):
            heads = []
            for h in range(config.num_heads):
                query = X[b, q] @ p["query"]["kernel"][:, h] + bias["query"][..., h, :]
                key = keys @ p["key"]["kernel"][:, h] + bias["key"][..., h, :]
                value = keys @ p["value"]["kernel"][:, h] + bias["value"][..., h, :]
                scores = np.exp(key @ query / np.sqrt(config.d_k))
                heads.append(scores / scores.sum() @ value)
                assert heads[-1].shape == (config.d_v,)
            output = p["output"]["kernel"].reshape(config.num_heads * config.d_v, config.d_model)
            expected[b, q] = np.concatenate(heads) @ output + p["output"].get("bias", 0)
    np.testing.assert_allclose(attend(X, MEMORY, MASK, config), expected, atol=1e-5)


def test_masked_memory_is_never_seen():
    changed = MEMORY.copy()
    changed[0, 3:] = 1e6
    np.testing.assert_array_equal(attend(X, MEMORY, MASK), attend(X, changed, MASK))


def test_row_with_nothing_to_attend_to_gives_zeros_and_finite_gradients():
    mask = MASK.copy()
    mask[0] = False

    def loss(params, x, memory):
        y = MultiHeadAttention(TINY).apply({"params": params}, x, memory, mask)
        return (y**2).sum(), y

    gradients, y = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(attention_params(TINY), X, MEMORY)
    np.testing.assert_array_equal(y[0], 0)
    assert np.abs(y[1]).min() > 0
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path
    np.testing.assert_array_equal(gradients[1][0], 0)
    np.testing.assert_array_equal(gradients[2][0], 0)


@pytest.mark.parametrize("compatibility", ["scaled_dot", "dot"])
def test_fused_attention_divides_by_the_root_of_d_k_where_plain_attention_does(compatibility):
    config = dataclasses.replace(TINY, d_k=8, d_v=8, dtype="bfloat16", compatibility=compatibility)
    fused = dataclasses.replace(config, attention_implementation="cudnn")
    x = 3 * jax.random.normal(jax.random.key(0), (2, 6, TINY.d_model))
    mask = jnp.ones((1, 1, 1, 6), bool)
    params = {"params": MultiHeadAttention(config).init(jax.random.key(1), x, x, mask)["params"]}
    plain, ours = (MultiHeadAttention(c).apply(params, x, x, mask) for c in (config, fused))
    np.testing.assert_allclose(np.float32(ours), np.float32(plain), atol=0.1)

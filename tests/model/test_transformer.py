"""The laws of the whole model. Letters of shapes: B batch, S source, T target, H heads, K hypotheses, V vocabulary."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import TINY, VARIANTS
from tests.model.parameters import random_params
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.transformer import (
    AddAndNorm,
    Transformer,
    attention_maps,
    init_params,
    layer_norm,
    shift_right,
)
from transformer_flax.special_tokens import BEGIN_ID, END_ID, NUM_SPECIAL, PAD_ID

# Two sources with three targets each, as a search with three hypotheses holds them.
B, K, S, T = 2, 3, 7, 6
SOURCES = np.array([[5, 9, 14, 3, 28, 11, 2], [17, 4, 8, 2, 0, 0, 0]])
SOURCE = np.repeat(SOURCES, K, axis=0)
# In the first no token comes twice, so that each has the gradients of its embedding to itself.
TARGET = np.array(
    [
        [7, 24, 21, 13, 5, 2],
        [9, 3, 2, 0, 0, 0],
        [28, 28, 4, 16, 2, 0],
        [12, 3, 19, 25, 2, 0],
        [2, 0, 0, 0, 0, 0],
        [12, 3, 7, 6, 18, 2],
    ]
)


def logits_of(config, source=SOURCE, target=TARGET, dropout_key=None):
    # Not jitted: op by op, all variants share their compilations; as a whole, each would take a second or more.
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return np.asarray(Transformer(config).apply({"params": random_params(config)}, source, target, rngs=rngs))


def pad(tokens, amount):
    return np.pad(tokens, ((0, 0), (0, amount)), constant_values=PAD_ID)


# ----- the decoder's input


def test_special_tokens_are_the_first_ids():
    assert sorted({PAD_ID, BEGIN_ID, END_ID}) == list(range(NUM_SPECIAL))


def test_decoder_reads_the_target_one_position_late_behind_the_begin_symbol():
    np.testing.assert_array_equal(shift_right(jnp.array([[5, 6, 2, 0], [7, 2, 0, 0]])), [[1, 5, 6, 2], [1, 7, 2, 0]])
    np.testing.assert_array_equal(shift_right(jnp.array([[2]])), [[1]])


# ----- causality


def test_logits_see_the_target_before_them_and_nothing_later(variant):
    logits = logits_of(variant)
    for k in range(T):
        changed = TARGET.copy()
        changed[:, k:] = NUM_SPECIAL + (changed[:, k:] + 1) % (variant.vocab_size - NUM_SPECIAL)
        changed_logits = logits_of(variant, target=changed)
        # To the bit: what is later has no weight at all.
        np.testing.assert_array_equal(changed_logits[:, : k + 1], logits[:, : k + 1])
        if k + 1 < T:  # and the very next one does see it
            assert (np.abs(changed_logits - logits)[:, k + 1].max(axis=-1) > 1e-3).all()


def test_gradients_reach_the_target_before_them_and_nothing_later(variant):
    # Every token stands at one place of one row only, so the gradients of its embedding are those of that place; tied,
    # it would have gradients as a source word and as an output too.
    config = dataclasses.replace(variant, tie_embeddings=False, num_layers=1, vocab_size=NUM_SPECIAL + T * T)
    target = np.arange(NUM_SPECIAL, config.vocab_size).reshape(T, T)
    memory = np.random.default_rng(0).normal(size=(T, S, config.d_model)).astype(np.float32)
    params = random_params(config)

    @jax.jit
    @jax.grad
    def gradient(embedding):
        variables = {"params": params | {"target_embedding": {"embedding": embedding}}}
        logits = Transformer(config).apply(variables, target, memory, np.ones((T, 1, 1, S), bool), method="decode")
        return jnp.einsum("ttv->", logits)  # row t has the gradients of the logits at t

    of_tokens = gradient(params["target_embedding"]["embedding"])[target]
    reached = np.abs(of_tokens).max(axis=-1)  # by the logits at t, of the token at u: [t, u]
    earlier = np.tril(np.ones((T, T), bool), -1)
    np.testing.assert_array_equal(reached[~earlier], 0)
    assert (reached[earlier] > 1e-4).all()


# ----- padding and batches


def test_more_padding_changes_nothing(variant):
    padded = logits_of(variant, pad(SOURCE, 9 - S), pad(TARGET, 9 - T))
    np.testing.assert_allclose(padded[:, :T], logits_of(variant), atol=1e-5)


def test_other_sentences_of_the_batch_change_nothing():
    logits = logits_of(TINY)
    for row in range(B * K):
        source, target = SOURCE[::-1].copy(), np.roll(TARGET, 1, axis=1)
        source[row], target[row] = SOURCE[row], TARGET[row]
        among_others = logits_of(TINY, source, target)
        np.testing.assert_allclose(among_others[row], logits[row], atol=1e-5)
        assert np.abs(among_others - logits).max() > 1


def test_size_of_the_batch_changes_nothing():
    logits = logits_of(TINY)
    apply = jax.jit(Transformer(TINY).apply)
    for row in range(B * K):
        alone = apply({"params": random_params(TINY)}, SOURCE[row : row + 1], TARGET[row : row + 1])
        np.testing.assert_allclose(alone[0], logits[row], atol=1e-5)


def test_sentence_of_only_padding_has_finite_outputs_and_gradients():
    # Rows that fill up the last batch are of this kind.
    source, target = SOURCE.copy(), TARGET.copy()
    source[0] = target[0] = PAD_ID
    config = dataclasses.replace(TINY, num_layers=1)

    def loss(params):
        logits = Transformer(config).apply({"params": params}, source, target)
        return (jax.nn.log_softmax(logits)[..., 3] ** 2).mean(), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(random_params(config))
    assert np.isfinite(logits).all()
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path  # and every parameter is used


# ----- decoding one position at a time


def decode_stepwise(config, targets, parents=None):
    """Logits [B, K, T, V] of targets [B, K, T]. parents {position: [B, K]}: whose cache each goes on with there."""
    model, params = Transformer(config), {"params": random_params(config)}
    inputs = np.asarray(shift_right(targets.reshape(B * K, T))).reshape(B, K, T)
    room = T + 2  # more than is used, so that what is empty must be masked
    _, state = model.apply(params, SOURCES, K, room, method="begin", mutable=["memory", "cache"])
    outputs = []
    for position in jnp.arange(T):
        if parents and int(position) in parents:
            rows = np.arange(B)[:, None], parents[int(position)]
            state["cache"] = jax.tree.map(lambda leaf, rows=rows: leaf[rows], state["cache"])
        variables = params | state
        logits, updated = model.apply(variables, inputs[:, :, position], position, method="step", mutable=["cache"])
        state = state | updated
        outputs.append(logits)
    return np.stack(outputs, axis=2)


def test_decoding_stepwise_gives_the_logits_of_the_whole_target_at_once(variant):
    stepwise = decode_stepwise(variant, TARGET.reshape(B, K, T))
    np.testing.assert_allclose(stepwise, logits_of(variant).reshape(B, K, T, -1), atol=1e-5)


def test_hypotheses_may_go_on_from_each_others_caches():
    # As in a beam search: before position 3, hypothesis k takes over what hypothesis parents[k] has read until then.
    parents = np.array([[2, 0, 0], [1, 1, 2]])
    targets = TARGET.reshape(B, K, T)
    inherited = targets.copy()
    inherited[:, :, :3] = targets[np.arange(B)[:, None], parents][:, :, :3]
    # The input at position 3 is the target at 2: the first token after the parent's cache is in it already.
    read = inherited.copy()
    read[:, :, :2] = targets[:, :, :2]
    stepwise = decode_stepwise(TINY, read, parents={3: parents})
    expected = logits_of(TINY, target=inherited.reshape(B * K, T)).reshape(B, K, T, -1)
    np.testing.assert_allclose(stepwise[:, :, 3:], expected[:, :, 3:], atol=1e-5)


# ----- numbers


def test_layer_norm_adds_epsilon_to_the_variance():
    def normalise(*x):
        variables = {"params": {"scale": np.ones(len(x)), "bias": np.zeros(len(x))}}
        return layer_norm(TINY).apply(variables, np.array(x, np.float32))

    # Variance 1e-6, epsilon 1e-6: 1e-3 / sqrt(2e-6). Epsilon added to the standard deviation would give 0.999.
    np.testing.assert_allclose(normalise(1e-3, -1e-3), [0.5**0.5, -(0.5**0.5)], rtol=1e-4)
    # E[x^2] - E[x]^2 is 1e8 - 1e8 here, in float32.
    np.testing.assert_allclose(normalise(10_001, 9_999, 10_001, 9_999), [1, -1, 1, -1], rtol=1e-4)


def test_initial_parameters_are_float32_of_the_right_spread():
    config = dataclasses.replace(TINY, num_layers=1, dtype="bfloat16", positions="learned", attention_bias=True)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert leaf.dtype == jnp.float32, path
        if path[-1].key in ("embedding", "table"):  # times sqrt(d_model), an embedding starts at one
            assert abs(leaf.std() * config.d_model**0.5 - 1) < 0.1, path
        elif path[-1].key == "kernel":  # Glorot: uniform within sqrt(6 / (inputs + outputs)) of the whole matrix
            inputs = leaf.size // config.d_model if path[-2].key == "output" else leaf.shape[0]
            limit = (6 / (inputs + leaf.size // inputs)) ** 0.5
            assert 0.9 * limit < jnp.abs(leaf).max() <= limit, path
        else:
            assert (leaf == (path[-1].key == "scale")).all(), path


def test_bfloat16_stays_near_float32_and_gives_float32_logits():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    assert random_params(config)["embedding"]["embedding"].dtype == np.float32
    exact, rounded = logits_of(TINY), logits_of(config)
    assert rounded.dtype == np.float32
    difference = np.abs(rounded - exact)
    # A bfloat16 keeps 8 bits, 0.4 %; logits here spread by about one. Were it all float32, they would be equal.
    assert 1e-3 < difference.max() < 0.15
    assert difference.mean() < 0.02


def test_bfloat16_decodes_stepwise_as_it_does_at_once():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    stepwise = decode_stepwise(config, TARGET.reshape(B, K, T))
    assert stepwise.dtype == np.float32
    np.testing.assert_allclose(stepwise, logits_of(config).reshape(B, K, T, -1), atol=0.1)


# ----- dropout


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    rate, size = 0.3, 100_000
    y = np.asarray(Dropout(rate).apply({}, np.ones(size, np.float32), rngs={"dropout": jax.random.key(0)}))
    assert set(y.round(5)) == {0, np.float32(1 / 0.7).round(5)}
    # The count of zeros has standard deviation sqrt(rate (1 - rate) / size) = 0.00145; five of them.
    assert abs((y == 0).mean() - rate) < 0.0073
    assert abs(y.mean() - 1) < 0.0073 / 0.7


def test_dropout_without_a_key_or_with_rate_zero_does_nothing():
    x = np.arange(5.0, dtype=np.float32)
    np.testing.assert_array_equal(Dropout(0.9).apply({}, x), x)
    np.testing.assert_array_equal(Dropout(0).apply({}, x, rngs={"dropout": jax.random.key(0)}), x)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "ffn_dropout"])
def test_each_dropout_is_active_with_a_key_and_differs_by_key(rate):
    config = dataclasses.replace(TINY, **{"dropout": 0.0, rate: 0.5})
    without = logits_of(config)
    first, again, second = (logits_of(config, dropout_key=jax.random.key(n)) for n in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    for one, other in ((first, second), (first, without), (second, without)):
        assert (np.abs(one - other).max(axis=(1, 2)) > 1e-2).all()


@pytest.mark.parametrize(
    ("rates", "places"),
    [
        # Embeddings of both sides; the outputs of two sub-layers in the encoder's layers, three in the decoder's.
        ({"dropout": 0.1}, 2 + (2 + 3) * TINY.num_layers),
        ({"attention_dropout": 0.1}, (1 + 2) * TINY.num_layers),
        ({"ffn_dropout": 0.1}, (1 + 1) * TINY.num_layers),
        ({}, 0),
    ],
)
def test_dropout_is_where_the_config_puts_it_and_nowhere_else(rates, places):
    config = dataclasses.replace(TINY, **{"dropout": 0.0, **rates})
    params = random_params(config)
    active = []

    def count(call, args, kwargs, context):
        if isinstance(context.module, Dropout) and context.module.rate > 0:
            active.append(context.module.path)
        return call(*args, **kwargs)

    with nn.intercept_methods(count):
        jax.eval_shape(lambda: Transformer(config).apply({"params": params}, SOURCE, TARGET))
    assert len(active) == places


@pytest.mark.parametrize("pre_norm", [False, True])
def test_dropout_spares_the_residual_connection(pre_norm):
    config = dataclasses.replace(TINY, dropout=0.9, pre_norm=pre_norm)
    x = np.random.default_rng(0).normal(size=(4, config.d_model)).astype(np.float32)
    variables = {"params": {"norm": {"scale": np.ones(config.d_model), "bias": np.zeros(config.d_model)}}}
    y = AddAndNorm(config).apply(variables, x, jnp.zeros_like, rngs={"dropout": jax.random.key(0)})
    normalised = (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)
    np.testing.assert_allclose(y, x if pre_norm else normalised, atol=1e-5)


# ----- attention maps


@pytest.fixture(scope="module")
def maps():
    return jax.tree.map(np.asarray, attention_maps(TINY, random_params(TINY), SOURCE, TARGET))


def test_attention_maps_are_one_per_layer_sentence_and_head(maps):
    first = (TINY.num_layers, B * K, TINY.num_heads)
    shapes = {name: weights.shape for name, weights in maps.items()}
    assert shapes == {"encoder": (*first, S, S), "decoder": (*first, T, T), "cross": (*first, T, S)}
    for weights in maps.values():
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_attention_maps_give_nothing_to_padding(maps):
    is_padding = SOURCE == PAD_ID
    assert is_padding.any()
    for weights in (maps["encoder"], maps["cross"]):
        to_padding = np.moveaxis(weights, (1, -1), (0, 1))[is_padding]
        np.testing.assert_array_equal(to_padding, 0)
    # The decoder's rows up to the end symbol are the ones with a loss: to them, padding is later.
    for row, target in enumerate(TARGET):
        is_word = target != PAD_ID
        is_padding = np.asarray(shift_right(target[None]))[0] == PAD_ID
        np.testing.assert_array_equal(maps["decoder"][:, row][:, :, is_word][..., is_padding], 0)


def test_attention_maps_of_the_decoder_are_lower_triangular(maps):
    later = np.triu(np.ones((T, T), bool), 1)
    np.testing.assert_array_equal(maps["decoder"][..., later], 0)
    assert (maps["decoder"][..., ~later] > 0).all()


def test_attention_maps_do_not_change_with_the_batch(maps):
    without_the_last = jax.jit(attention_maps, static_argnums=0)(TINY, random_params(TINY), SOURCE[:-1], TARGET[:-1])
    for name, weights in maps.items():
        np.testing.assert_allclose(weights[:, :-1], without_the_last[name], atol=1e-5)


def test_attention_maps_are_those_of_every_variant():
    for config in VARIANTS.values():
        shapes = jax.eval_shape(lambda c=config: attention_maps(c, random_params(c), SOURCE, TARGET))
        assert shapes["cross"].shape == (config.num_layers, B * K, config.num_heads, T, S)

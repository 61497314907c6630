"""Dropout (section 5.4): where it is, and what it does there."""

import dataclasses
import functools

import flax.linen as nn
import jax
import numpy as np
import pytest

from tests.conftest import ONE_LAYER, TINY
from tests.model.parameters import random_params
from tests.model.sentences import SOURCE, TARGET, S, T, logits_of
from tests.relatives.rivals import CONVOLUTIONAL, RECURRENT
from tests.relatives.test_classifier import tiny
from transformer_flax.model.dropout import Dropout, random_bits
from transformer_flax.model.layers import AddAndNorm
from transformer_flax.model.positions import sinusoids
from transformer_flax.model.registry import kind_of, make_model
from transformer_flax.model.residuals import Admin, DeepNorm, PreNorm, TFixup
from transformer_flax.model.transformer import Transformer, shift_right


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    rate, size = 0.3, 100_000
    y = np.asarray(Dropout(rate).apply({}, np.ones(size, np.float32), rngs={"dropout": jax.random.key(0)}))
    assert set(y.round(5)) == {0, np.float32(1 / 0.7).round(5)}
    # The count of zeros has standard deviation sqrt(rate (1 - rate) / size) = 0.00145; five of them.
    assert abs((y == 0).mean() - rate) < 0.0073
    assert abs(y.mean() - 1) < 0.0073 / 0.7


def test_bits_are_independent_of_their_neighbours_of_other_keys_and_of_each_other():
    keys = [jax.random.fold_in(jax.random.key(0), n) for n in range(64)]
    bits = np.stack([random_bits(key, (64, 64)) for key in keys]).reshape(64, -1)
    each = ((bits[..., None] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.float32) * 2 - 1  # [64, 4096, 32]
    size = each[..., 0].size
    bound = 5 / np.sqrt(size)  # standard deviations of a mean of independent signs
    assert np.abs(each.mean((0, 1))).max() < bound
    for shift in (1, 2, 64, 2048):
        assert np.abs((each[:, shift:] * each[:, :-shift]).mean((0, 1))).max() < 1.5 * bound
    for shift in (1, 2, 32):
        assert np.abs((each[shift:] * each[:-shift]).mean((0, 1))).max() < 1.5 * bound
    pairs = np.einsum("nib,nic->bc", each, each) / size
    assert np.abs(pairs - np.eye(32)).max() < bound
    low = bits < np.uint32(0.1 * 2**32)  # a mask: how often each place, and each key, drops
    for axis, trials in ((0, 64), (1, 4096)):
        spread = (low.mean(axis) - 0.1).std() / np.sqrt(0.1 * 0.9 / trials)
        assert 0.7 < spread < 1.3


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_every_word_of_a_key_of_any_generator_changes_the_bits(generator):
    words = jax.random.key_data(jax.random.key(5, impl=generator))
    bits = random_bits(jax.random.wrap_key_data(words, impl=generator), (1_000,))
    for n in range(len(words)):
        other = random_bits(jax.random.wrap_key_data(words.at[n].add(1), impl=generator), (1_000,))
        assert np.mean(bits == other) < 0.01
    y = Dropout(0.5).apply({}, np.ones(1_000, np.float32), rngs={"dropout": jax.random.key(5, impl=generator)})
    assert abs(np.mean(y == 0) - 0.5) < 0.08  # five standard deviations


def test_the_bits_of_a_key_stay_the_same():
    # Runs that were begun go on with the same masks.
    bits = random_bits(jax.random.key(5), (2, 2))
    np.testing.assert_array_equal(bits, [[1548080446, 3222836916], [630870762, 1928472627]])


def test_dropout_without_a_key_or_with_rate_zero_does_nothing():
    x = np.arange(5.0, dtype=np.float32)
    np.testing.assert_array_equal(Dropout(0.9).apply({}, x), x)
    np.testing.assert_array_equal(Dropout(0).apply({}, x, rngs={"dropout": jax.random.key(0)}), x)


@pytest.mark.parametrize(
    "config",
    [dataclasses.replace(TINY, num_layers=1, dropout=0.5), RECURRENT, CONVOLUTIONAL],
    ids=["transformer", "recurrent", "convolutional"],
)
def test_dropout_is_active_with_a_key_and_differs_by_key(config):
    without = logits_of(config)
    first, again, second = (logits_of(config, dropout_key=jax.random.key(n)) for n in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    for one, other in ((first, second), (first, without), (second, without)):
        assert (np.abs(one - other).max(axis=(1, 2)) > 1e-2).all()


@pytest.mark.parametrize(
    ("rate", "places"),
    [
        # Embeddings of both sides; the outputs of two sub-layers in the encoder's layers, three in the decoder's.
        ("dropout", 2 + (2 + 3) * TINY.num_layers),
        ("attention_dropout", (1 + 2) * TINY.num_layers),
        ("ffn_dropout", (1 + 1) * TINY.num_layers),
    ],
)
def test_dropout_is_where_the_config_puts_it_and_nowhere_else(rate, places):
    config = dataclasses.replace(TINY, **{"dropout": 0.0, rate: 0.5})
    halved = []

    def halve(call, args, kwargs, context):
        y = call(*args, **kwargs)
        if isinstance(context.module, Dropout) and context.module.rate > 0:
            halved.append(context.module.path)
            return y / 2
        return y

    params = random_params(config)
    with nn.intercept_methods(halve):
        logits = Transformer(config).apply({"params": params}, SOURCE, TARGET)
    assert len(halved) == places
    assert np.abs(logits - logits_of(TINY)).max() > 1e-2


def test_dropout_is_applied_to_the_sums_of_embeddings_and_positions():
    given = []

    def note(call, args, kwargs, context):
        if context.module.name == "embedding_dropout":
            given.append(args[0])
        return call(*args, **kwargs)

    params = random_params(TINY)
    with nn.intercept_methods(note):
        Transformer(TINY).apply({"params": params}, SOURCE, TARGET)
    for x, tokens in zip(given, (SOURCE, shift_right(TARGET)), strict=True):
        embedded = params["embedding"]["embedding"][tokens] * TINY.d_model**0.5
        np.testing.assert_allclose(x, embedded + sinusoids(tokens.shape[1], TINY.d_model), atol=1e-5)


def dropping_all(given):
    """Context manager: every dropout drops all that it is given, and appends it to the list."""

    def drop(call, args, kwargs, context):
        if isinstance(context.module, Dropout) and context.module.rate > 0:
            given.append(args[0])
            return args[0] * 0
        return call(*args, **kwargs)

    return nn.intercept_methods(drop)


def test_dropout_in_a_sub_layer_is_on_what_the_softmax_and_the_relu_return():
    config = dataclasses.replace(ONE_LAYER, dropout=0.0, attention_dropout=0.5, ffn_dropout=0.5)
    variables, given = {"params": random_params(config)}, []
    with dropping_all(given):
        Transformer(config).apply(variables, SOURCE, TARGET)
    assert [x.ndim for x in given] == [4, 3, 4, 4, 3]  # the weights of all heads, and the hidden layers
    for x in given:
        if x.ndim == 4:
            np.testing.assert_allclose(x.sum(axis=-1), 1, atol=1e-5)
        else:
            assert x.shape[-1] == config.d_ff
            assert x.min() == 0 < x.max()


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        (tiny("mean"), [(S,), (S,), (S,), ()]),  # embeddings, two sub-layers, the pooled vector
        (RECURRENT, [(S,), (S,), (S,), (T,), (T,), (T,), (T,)]),  # embeddings and two layers of each side, features
        # Embeddings and the padded inputs of two convolutions of each side, the decoder's output.
        (CONVOLUTIONAL, [(S,), (S + 2,), (S + 2,), (T,), (T + 2,), (T + 2,), (T,)]),
    ],
    ids=["classifier", "recurrent", "convolutional"],
)
def test_dropout_of_the_relatives_is_in_all_its_places_and_the_last_one_hides_everything(config, lengths):
    variables, inputs = {"params": random_params(config)}, (SOURCE, TARGET)[: len(kind_of(config).reads)]
    given = []
    with dropping_all(given):
        logits = jax.jit(make_model(config).apply)(variables, *inputs)
    assert [x.shape for x in given] == [(len(SOURCE), *length, config.d_model) for length in lengths]
    assert np.ptp(logits.reshape(-1, logits.shape[-1]), axis=0).max() == 0  # the logits of nothing, for every input


@pytest.mark.parametrize(
    "residual",
    [AddAndNorm, PreNorm, pytest.param(functools.partial(DeepNorm, alpha=2.0), id="DeepNorm"), TFixup, Admin],
)
def test_dropout_is_on_the_sub_layers_output_and_spares_the_residual_connection(residual):
    x, y = np.random.default_rng(0).normal(size=(2, 4, TINY.d_model)).astype(np.float32)
    ones = np.ones(TINY.d_model)
    variables = {"params": {"norm": {"scale": ones, "bias": 0 * ones}, "omega": ones}}
    with dropping_all([]):
        z = residual(TINY).apply(variables, x, lambda _: y)
    normalised = (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)
    np.testing.assert_allclose(z, x if residual in (PreNorm, TFixup) else normalised, atol=1e-5)

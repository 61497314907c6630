"""The laws of the rivals alone; tests/model/test_transformer.py has those of every kind of translator.

Letters of shapes: B batch, S source, T target, K hypotheses.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.decoding.translators import SETTINGS, WORDS, assert_scored, new, scores_of, texts
from tests.model.parameters import random_params
from tests.model.sentences import SOURCE, TARGET, B, K, S, T, logits_of
from tests.relatives.rivals import CONVOLUTIONAL, RECURRENT, RIVALS
from transformer_flax.model.flops import count_parameters, forward_flops, training_flops
from transformer_flax.model.registry import attention_maps, init_params, make_model
from transformer_flax.relatives.convolutional import ConvolutionalConfig
from transformer_flax.special_tokens import PAD_ID
from transformer_flax.training.loss import translation_loss


@pytest.fixture(params=RIVALS)
def rival(request):
    return RIVALS[request.param]


@pytest.fixture(params=["recurrent", "convolutional"])
def one_of_each(request):
    """Fewer of them, where there is much to compile."""
    return RIVALS[request.param]


def pad(tokens, amount):
    return np.pad(tokens, ((0, 0), (0, amount)), constant_values=PAD_ID)


# ----- causality, padding, batches


def test_padding_changes_neither_outputs_nor_loss_nor_gradients(one_of_each):
    loss_fn = translation_loss(make_model(one_of_each), 0.1)

    @jax.jit
    def measure(params, source, target):
        def loss(params):
            return loss_fn(params, {"source": source, "target": target}, None)[0]["loss"]

        return jax.value_and_grad(loss)(params)

    params = random_params(one_of_each)
    loss, gradients = measure(params, SOURCE, TARGET)
    more = np.zeros((2, S + 3), int)  # rows that fill up a batch
    padded = np.concatenate([pad(SOURCE, 3), more]), np.concatenate([pad(TARGET, 2), more[:, : T + 2]])
    loss_padded, gradients_padded = measure(params, *padded)
    assert float(loss_padded) == pytest.approx(float(loss), rel=1e-5)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradients))
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        other = gradients_padded
        for key in path:
            other = other[key.key]
        np.testing.assert_allclose(other, gradient, atol=1e-5 * scale, err_msg=str(path))
        assert np.abs(gradient).max() > 0, path  # every parameter is used


def test_a_word_of_the_source_matters_wherever_it_stands(rival):
    source, target = np.repeat(SOURCE[:1], S - 1, axis=0), np.repeat(TARGET[:1], S - 1, axis=0)
    changed = np.where(np.eye(S - 1, S, dtype=bool), 20, source)  # in each row another
    assert (np.abs(logits_of(rival, changed, target) - logits_of(rival, source, target)).max((1, 2)) > 1e-4).all()


# ----- decoding one position at a time


@pytest.mark.parametrize(
    "config", [dataclasses.replace(RECURRENT, num_layers=1), CONVOLUTIONAL], ids=["recurrent", "convolutional"]
)
def test_translations_do_not_depend_on_the_batch_and_have_the_log_probabilities_of_one_pass(config):
    translator = new((config,))
    together = list(translator.search(WORDS))
    alone = list(new((config,), batch_size=1).search(WORDS[::-1]))[::-1]
    assert texts(together) == texts(alone)
    np.testing.assert_allclose(scores_of(together), scores_of(alone), rtol=1e-5, atol=1e-4)
    assert len(set(map(tuple, texts(together)))) == len(WORDS)
    assert all(len(found) == SETTINGS["nbest"] for found in together)
    assert_scored(translator, WORDS[1], together[1])


# ----- dropout, numbers, attention


def test_attention_maps_are_of_the_source_alone_and_give_nothing_to_padding(rival):
    maps = jax.jit(functools.partial(attention_maps, rival))(random_params(rival), SOURCE, TARGET)
    if getattr(rival, "attention", "") == "none":
        assert maps == {}
        return
    layers = rival.num_layers if hasattr(rival, "kernel_width") else 1
    assert {kind: weights.shape for kind, weights in maps.items()} == {"cross": (layers, B * K, 1, T, S)}
    maps = jax.device_get(maps)
    np.testing.assert_allclose(maps["cross"].sum(-1), 1, rtol=1e-5)
    to_padding = np.moveaxis(maps["cross"], (1, -1), (0, 1))[SOURCE == PAD_ID]
    np.testing.assert_array_equal(to_padding, 0)


# ----- cost


def by_hand(c, source, target):
    """Parameters without embeddings, and floating-point operations, from formulas."""
    s, t, pairs = int(source.sum()), int(target.sum()), int((source * target).sum())
    d, n = c.d_model, c.num_layers
    logits = t * d * c.vocab_size
    if isinstance(c, ConvolutionalConfig):
        convolution = 2 * c.kernel_width * d**2  # bias: 2 d; then two matrices for attention
        parameters = c.max_length * d + n * (2 * convolution + 4 * d + 2 * (d**2 + d)) + d**2 + d
        products = n * ((s + t) * convolution + t * 2 * d**2 + pairs * 2 * d) + t * d**2 + logits
        return parameters, 2 * products
    gates, half = {"gru": 3, "lstm": 4}[c.cell], d // 2
    one_way, forward = gates * half * (d + half), gates * d * (d + d)  # biases: 4 per feature
    parameters = n * (2 * (one_way + 4 * half) + forward + 4 * d) + 2 * d**2 + d
    products = n * (s * 2 * one_way + t * forward) + t * 2 * d**2 + logits
    if c.attention == "additive":
        parameters, products = parameters + 2 * d**2 + d, products + (s + t) * d**2
    if c.attention != "none":
        products += pairs * 2 * d
    return parameters, 2 * products


def test_counts_are_those_of_the_formulas(rival):
    lengths = np.array([1, 7, 2, 30]), np.array([1, 3, 9, 33])
    parameters, flops = by_hand(rival, *lengths)
    matrices = 1 if rival.tie_embeddings else 3
    assert sum(count_parameters(rival).values()) == parameters + matrices * rival.vocab_size * rival.d_model
    counts = forward_flops(rival, *lengths)
    assert sum(counts.values()) == flops
    assert counts.keys() <= {*count_parameters(rival), "attention", "logits"}
    width = rival.d_model * (1 if isinstance(rival, ConvolutionalConfig) else 2)
    assert counts["output"] == 2 * lengths[1].sum() * width * rival.d_model


def test_attention_without_parameters_is_counted_by_its_name():
    config = dataclasses.replace(RECURRENT, attention="dot")
    assert forward_flops(config, np.array([5]), np.array([7]))["attention"] == 2 * 5 * 7 * 2 * config.d_model


@pytest.mark.parametrize(
    ("config", "length"), [(RECURRENT, 1), (CONVOLUTIONAL, 20)], ids=["recurrent", "convolutional"]
)
def test_training_takes_about_the_flops_that_xla_counts(config, length):
    # Of one step of time where there is a loop, as XLA counts its body once.
    config = dataclasses.replace(config, vocab_size=1_000, d_model=256, dropout=0.0)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((64, length), np.int32)

    def loss(params, source, target):
        return make_model(config).apply({"params": params}, source, target).sum()

    counted = jax.jit(jax.grad(loss)).lower(params, tokens, tokens).cost_analysis()["flops"]
    lengths = np.full(64, length)
    assert training_flops(config, lengths, lengths) == pytest.approx(counted, rel=0.1)

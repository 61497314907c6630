"""The recurrent translator: its attention by hand, its bottleneck, its config."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from tests.model.parameters import random_params
from tests.model.sentences import SOURCE
from tests.relatives.rivals import RECURRENT
from transformer_flax.errors import UserError
from transformer_flax.relatives.recurrent import OneHeadAttention, RecurrentTranslator
from transformer_flax.relatives.seq2seq import Memory
from transformer_flax.special_tokens import END_ID

D = RECURRENT.d_model
RNG = np.random.default_rng(0)
Y, STATES = (RNG.normal(size=(2, length, D)).astype(np.float32) for length in (3, 5))
MASK = np.array([[[1, 1, 1, 1, 1]], [[1, 1, 0, 0, 0]]], bool)
W, U, V = (RNG.normal(size=shape).astype(np.float32) / D**0.5 for shape in ((D, D), (D, D), (D, 1)))
SCORES = {  # of one state of the decoder and one of the encoder
    "additive": lambda s, h: np.tanh(s @ W + h @ U) @ V[:, 0],
    "dot": lambda s, h: s @ h,
    "scaled_dot": lambda s, h: s @ h / D**0.5,
}


@pytest.mark.parametrize("kind", SCORES)
def test_attention_is_a_softmax_of_its_score_over_what_is_no_padding(kind):
    attention = OneHeadAttention(dataclasses.replace(RECURRENT, attention=kind))
    params = {"query": {"kernel": W}, "key": {"kernel": U}, "v": V.T} if kind == "additive" else {}
    variables = {"params": params}
    keys = attention.apply(variables, STATES, method=lambda module, states: module.key(states))
    contexts = attention.apply(variables, Y, Memory(keys, STATES, MASK))
    for row, position in np.ndindex(2, 3):
        there = STATES[row, MASK[row, 0]]
        exponentials = np.exp([SCORES[kind](Y[row, position], h) for h in there])
        expected = exponentials / exponentials.sum() @ there
        np.testing.assert_allclose(contexts[row, position], expected, rtol=1e-4, atol=1e-5)


def test_the_weights_of_an_additive_score_start_with_a_length_of_1():
    attention = OneHeadAttention(dataclasses.replace(RECURRENT, d_model=400))
    y = np.ones((1, 1, 400), np.float32)
    params = attention.init(jax.random.key(0), y, Memory(y, y, np.ones((1, 1, 1), bool)))["params"]
    assert np.linalg.norm(params["v"]) == pytest.approx(1, abs=0.15)


def test_without_attention_the_context_is_the_state_that_the_encoder_ends_in():
    # Of the last layer, both directions side by side: the last word's state forwards, and the first's backwards.
    config = dataclasses.replace(RECURRENT, attention="none", cell="lstm")
    params = {"params": random_params(config)}
    source = np.concatenate([SOURCE, np.eye(1, SOURCE.shape[1], dtype=int) * END_ID])  # the last without words

    @jax.jit
    def encode():
        with_and_without = (config, dataclasses.replace(config, attention="dot"))
        return [RecurrentTranslator(c).apply(params, source, method="encode") for c in with_and_without]

    (bottleneck, states), (everything, _) = encode()
    half, lengths = D // 2, (source != 0).sum(axis=1)
    for row, length in enumerate(lengths):
        last = np.concatenate([everything.values[row, length - 1, :half], everything.values[row, 0, half:]])
        np.testing.assert_allclose(bottleneck.values[row, 0], last, atol=1e-6)
        np.testing.assert_allclose(states[-1][1][row], last, atol=1e-6)  # h, of (c, h), where the decoder starts
    y = np.zeros((len(source), 4, D), np.float32)
    contexts = OneHeadAttention(config).apply({}, y, bottleneck)
    np.testing.assert_array_equal(contexts, np.repeat(bottleneck.values, 4, axis=1))


def test_the_output_is_of_the_context_and_then_of_the_state():
    config = dataclasses.replace(RECURRENT, attention="none")
    params = random_params(config)
    context = STATES[:1, :1]
    memory = Memory(context, context, MASK[:1])
    features, _ = RecurrentTranslator(config).apply({"params": params}, Y[:1], memory, method="_features")
    joined = np.concatenate([np.repeat(context, Y.shape[1], axis=1), Y[:1]], axis=-1)
    expected = np.tanh(joined @ params["output"]["kernel"] + params["output"]["bias"])
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((field.name, None) for field in dataclasses.fields(RECURRENT)),
        *((name, value) for name in ("vocab_size", "num_layers", "d_model") for value in (0, 2.0, "2", True)),
        ("d_model", 15),
        ("cell", "rnn"),
        ("attention", "general"),
        ("dropout", 1.0),
        ("tie_embeddings", 1),
        ("dtype", "float16"),
    ],
)
def test_invalid_value_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(UserError, match=rf"^config\.model\.{name} is {re.escape(repr(value))}; it must be "):
        dataclasses.replace(RECURRENT, **{name: value})

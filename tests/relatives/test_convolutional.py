"""The convolutional translator: its layers by hand, how far it sees, its config."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from tests.model.parameters import random_params
from tests.model.sentences import SOURCE, TARGET, T
from tests.relatives.rivals import CONVOLUTIONAL
from transformer_flax.errors import UserError
from transformer_flax.relatives.convolutional import (
    ConvolutionalTranslator,
    DecoderConvolution,
    EncoderConvolution,
    GatedConvolution,
)
from transformer_flax.relatives.seq2seq import Memory
from transformer_flax.special_tokens import NUM_SPECIAL

D, K = CONVOLUTIONAL.d_model, CONVOLUTIONAL.kernel_width
PARAMS = random_params(CONVOLUTIONAL)
RNG = np.random.default_rng(0)


def gated(params, windows):
    """Computes a sigmoid(b) of windows [.., k, d_model], as the equations have it."""
    conv = params["convolution"]["conv"]
    ab = np.einsum("...kd,kde->...e", windows, conv["kernel"]) + conv["bias"]
    a, b = np.split(ab, 2, axis=-1)
    return a / (1 + np.exp(-b))


def test_a_convolution_starts_with_outputs_of_the_size_of_its_inputs():
    # A gate of about 1/2 divides the variance by 4; dropout by half has doubled that of the inputs.
    config = dataclasses.replace(CONVOLUTIONAL, d_model=100, dropout=0.5)
    params = GatedConvolution(config).init(jax.random.key(0), np.ones((1, 3, 100), np.float32))["params"]
    assert np.var(params["conv"]["kernel"]) * 3 * 100 == pytest.approx(4 * 0.5, rel=0.05)


def test_values_of_the_memory_are_its_keys_and_the_embeddings_of_the_words():
    memory = ConvolutionalTranslator(CONVOLUTIONAL).apply({"params": PARAMS}, SOURCE, method="encode")
    embedded = PARAMS["embedding"]["embedding"][SOURCE] * D**0.5 + PARAMS["positions"]["table"][: SOURCE.shape[1]]
    np.testing.assert_allclose(memory.values, (memory.keys + embedded) * 0.5**0.5, rtol=1e-4, atol=1e-5)


def test_a_layer_of_the_encoder_sees_as_far_on_both_sides_and_no_padding():
    x = RNG.normal(size=(2, 5, D)).astype(np.float32)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
    y = EncoderConvolution(CONVOLUTIONAL).apply({"params": PARAMS["encoder_0"]}, x, mask[..., None])
    for row, length in ((0, 5), (1, 3)):
        words = np.pad(x[row, :length], ((K // 2, K // 2), (0, 0)))
        windows = np.stack([words[i : i + K] for i in range(length)])
        expected = (x[row, :length] + gated(PARAMS["encoder_0"], windows)) * 0.5**0.5
        np.testing.assert_allclose(y[row, :length], expected, rtol=1e-4, atol=1e-5)


def test_a_layer_of_the_decoder_is_gehring_s():
    y, embedded = (RNG.normal(size=(1, 4, D)).astype(np.float32) for _ in range(2))
    z, e = (RNG.normal(size=(1, 5, D)).astype(np.float32) for _ in range(2))
    length = 3  # then padding
    memory = Memory(z, (z + e) * 0.5**0.5, np.arange(5)[None, None] < length)
    params = PARAMS["decoder_0"]
    ours = DecoderConvolution(CONVOLUTIONAL).apply({"params": params}, y, embedded, memory)
    before = np.pad(y[0], ((K - 1, 0), (0, 0)))
    for t in range(4):
        h = gated(params, before[t : t + K])
        d = (h @ params["query"]["kernel"] + params["query"]["bias"] + embedded[0, t]) * 0.5**0.5
        a = np.exp(z[0, :length] @ d / len(d) ** 0.5)  # Gehring et al. do not scale
        a /= a.sum()
        c = a @ (z[0, :length] + e[0, :length]) * 0.5**0.5 * length * (1 / length) ** 0.5
        h = (h + c @ params["output"]["kernel"] + params["output"]["bias"]) * 0.5**0.5
        np.testing.assert_allclose(ours[0, t], (y[0, t] + h) * 0.5**0.5, rtol=1e-4, atol=1e-5)


def test_the_decoder_sees_as_far_back_as_its_layers_reach():
    config = dataclasses.replace(CONVOLUTIONAL, num_layers=1)
    apply = jax.jit(ConvolutionalTranslator(config).apply)
    changed = TARGET.copy()
    changed[:, 0] = NUM_SPECIAL + 20  # which is read at position 1
    logits, others = (apply({"params": random_params(config)}, SOURCE, target) for target in (TARGET, changed))
    seen = np.abs(logits - others).max(axis=(0, 2)) > 0
    assert seen.tolist() == [False, *[True] * K, *[False] * (T - K - 1)]


def test_more_positions_than_were_learned_are_refused():
    config = dataclasses.replace(CONVOLUTIONAL, max_length=T)
    model = ConvolutionalTranslator(config)
    with pytest.raises(UserError, match=rf"7 positions is longer than the {T} that were learned"):
        model.apply(
            {"params": random_params(config)}, SOURCE[:, :5], 2, 7, method="init_cache", mutable=["memory", "cache"]
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((field.name, None) for field in dataclasses.fields(CONVOLUTIONAL)),
        *((name, value) for name in ("kernel_width", "max_length") for value in (0, 2.0, "3", True)),
        ("kernel_width", 4),
    ],
)
def test_invalid_value_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(UserError, match=rf"^config\.model\.{name} is {re.escape(repr(value))}; it must be "):
        dataclasses.replace(CONVOLUTIONAL, **{name: value})

import dataclasses

import jax
import numpy as np
import pytest

from tests.conftest import TINY
from tests.model.parameters import random_params
from transformer_flax.errors import UserError
from transformer_flax.model.positions import Positions, sinusoids
from transformer_flax.model.transformer import Transformer

LEARNED = dataclasses.replace(TINY, positions="learned")


def test_papers_sinusoids_are_the_numbers_worked_out_by_hand():
    # d_model 8: 10000^(2i/8) = 1, 10, 100, 1000; a sine and a cosine of each angle stand side by side.
    encoding = sinusoids(4, 8)
    assert encoding.shape == (4, 8)
    assert encoding.dtype == np.float32
    np.testing.assert_array_equal(encoding[0], [0, 1, 0, 1, 0, 1, 0, 1])  # sin 0, cos 0
    expected = [
        0.8414710,  # PE(1, 0) = sin(1)
        0.5403023,  # PE(1, 1) = cos(1)
        0.0998334,  # PE(1, 2) = sin(1 / 10)
        0.9950042,  # PE(1, 3) = cos(1 / 10)
        0.0099998,  # PE(1, 4) = sin(1 / 100)
        0.9999500,  # PE(1, 5) = cos(1 / 100)
        0.0010000,  # PE(1, 6) = sin(1 / 1000)
        0.9999995,  # PE(1, 7) = cos(1 / 1000)
    ]
    np.testing.assert_allclose(encoding[1], expected, atol=1e-7)
    np.testing.assert_allclose(encoding[3, 2], 0.2955202, atol=1e-7)  # PE(3, 2) = sin(3 / 10000^(2/8)) = sin(0.3)
    np.testing.assert_allclose(encoding[3, 3], 0.9553365, atol=1e-7)  # PE(3, 3) = cos(0.3)


def test_concatenated_sinusoids_are_the_numbers_worked_out_by_hand():
    # d_model 10: 10000^(i/4) = 1, 10, 100, 1000, 10000; five sines, then five cosines.
    encoding = sinusoids(4, 10, concatenated=True)
    assert encoding.shape == (4, 10)
    np.testing.assert_array_equal(encoding[0], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    sines = [0.1411200, 0.2955202, 0.0299955, 0.0030000, 0.0003000]  # sin of 3, 0.3, 0.03, 0.003, 0.0003
    cosines = [-0.9899925, 0.9553365, 0.9995500, 0.9999955, 1.0000000]
    np.testing.assert_allclose(encoding[3], sines + cosines, atol=1e-7)


def test_longest_timescale_is_10000_in_the_released_code_and_less_in_the_paper():
    position = 1000

    def timescale(sine, cosine):
        return position / np.arctan2(sine, cosine)

    paper = sinusoids(position + 1, 512)[position]
    concatenated = sinusoids(position + 1, 512, concatenated=True)[position]
    # 10000^(510/512) = 10000 * e^(-2/512 * ln 10000) = 10000 * 0.96466
    np.testing.assert_allclose(timescale(paper[510], paper[511]), 9646.6, rtol=1e-5)
    np.testing.assert_allclose(timescale(concatenated[255], concatenated[511]), 10000, rtol=1e-5)


def test_the_smallest_model_has_finite_sinusoids():
    # One pair only: the released code's exponent i / (d_model/2 - 1) would divide by zero.
    for concatenated in (False, True):
        np.testing.assert_allclose(
            sinusoids(2, 2, concatenated=concatenated), [[0, 1], [0.8414710, 0.5403023]], atol=1e-7
        )


@pytest.mark.parametrize("positions", ["sinusoidal", "sinusoidal_concatenated"])
def test_sinusoids_have_no_parameters_and_no_limit(positions):
    config = dataclasses.replace(TINY, positions=positions)
    encoding, variables = Positions(config).init_with_output(jax.random.key(0), config.max_length + 1000)
    assert not variables
    expected = sinusoids(config.max_length + 1000, config.d_model, concatenated=positions != "sinusoidal")
    np.testing.assert_array_equal(encoding, expected)


def test_learned_positions_are_the_first_rows_of_one_table():
    params = random_params(LEARNED)["positions"]
    assert params["table"].shape == (LEARNED.max_length, LEARNED.d_model)
    for length in (1, LEARNED.max_length):
        encoding = Positions(LEARNED).apply({"params": params}, length)
        np.testing.assert_array_equal(encoding, params["table"][:length])


@pytest.mark.parametrize("too_long", ["source", "target", "output"])
def test_more_positions_than_were_learned_are_refused_with_what_to_do(too_long):
    def tokens(name):
        return np.full((1, LEARNED.max_length + (name == too_long)), 3)

    def run(source, target):
        variables = {"params": random_params(LEARNED)}
        if too_long == "output":
            model, length = Transformer(LEARNED), LEARNED.max_length + 1
            _, cache = model.apply(variables, source, 1, length, method="init_cache", mutable=["memory", "cache"])
            zero = np.zeros((1, 1), np.int32)
            return model.apply(variables | cache, zero, zero, 0, method="decode_step", mutable=["cache"])
        return Transformer(LEARNED).apply(variables, source, target)

    # Indexing an array past its end gives the last row in JAX, silently.
    with pytest.raises(UserError, match=r"33 positions is longer than the 32 .*config\.model\.max_length"):
        jax.eval_shape(run, tokens("source"), tokens("target"))

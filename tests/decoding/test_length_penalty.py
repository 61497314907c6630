"""Length penalties, each against its formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_flax.decoding.search import LengthPenalty


@pytest.mark.parametrize(
    ("kind", "alpha", "length", "expected"),
    [
        ("gnmt", 0.6, 1, 1),  # a single token is the unit
        ("gnmt", 1.0, 7, 2),
        ("gnmt", 0.5, 19, 2),
        ("gnmt", -1.0, 7, 0.5),
        ("gnmt", 0.0, 50, 1),
        ("length", 0.6, 1, 1),
        ("length", 1.0, 7, 7),
        ("length", 0.5, 16, 4),
        ("length", -1.0, 8, 0.125),
        ("length", 0.0, 50, 1),
        ("length", 2, 7, 49),
        ("length", -1, 8, 0.125),  # an integer has no negative powers in JAX,
        ("length", 6, 100, 1e12),  # and large ones overflow
        ("none", 2.0, 7, 1),
    ],
)
def test_length_penalties(kind, alpha, length, expected):
    penalty = LengthPenalty(kind, alpha)
    assert penalty(length) == pytest.approx(expected)
    np.testing.assert_allclose(penalty(jnp.array([length])), expected, rtol=1e-6)

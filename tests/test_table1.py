"""Table 1: the layers that are timed are those of the table, and their paths as long as it says."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import table1_layers
from benchmarks.table1_layers import LAYERS
from tests import forked

N, D, H, K, R = 24, 8, 2, 3, 6
MADE = table1_layers.make_layers(D, H, K, R)
X = np.random.default_rng(3).normal(size=(N, D)).astype(np.float32)


def test_operations_are_the_paper_s():
    n, d, k, r = 50, 512, 3, 16
    costs = {name: layer(n, d, k, r) for name, layer in LAYERS.items()}
    assert costs["self-attention"] == (50 * 50 * 512, 1, 1)
    assert costs["recurrent"] == (50 * 512 * 512, 50, 50)
    assert costs["convolutional"] == (3 * 50 * 512 * 512, 1, pytest.approx(math.log(50) / math.log(3)))
    assert costs["separable convolutional"][0] == 3 * 50 * 512 + 50 * 512 * 512
    assert costs["restricted self-attention"] == (16 * 50 * 512, 1, 50 / 16)
    # Section 4: self-attention is faster than a recurrent layer while n is smaller than d; and with k = n, a separable
    # convolution costs as much as self-attention and a feed-forward layer together.
    assert costs["self-attention"].operations < costs["recurrent"].operations
    separable = LAYERS["separable convolutional"](n, d, n, r).operations
    assert separable == costs["self-attention"].operations + n * d**2
    growths = [layer(2 * 4096, d, k, r).operations / layer(4096, d, k, r).operations for layer in LAYERS.values()]
    assert [math.log2(growth) for growth in growths] == [2, 1, 1, 1, 1]  # exponents of n


def test_a_recurrent_layer_is_its_cell_at_one_position_after_the_other():
    inner, outer = (MADE["recurrent"].keywords[name] for name in ("inner", "outer"))
    state = np.zeros(D)
    for x, ours in zip(X, MADE["recurrent"](X), strict=True):
        state = np.tanh(x @ inner + state @ outer)
        np.testing.assert_allclose(ours, state, atol=1e-5)
    # Applied n times at all positions at once, the cell has brought every state to its end.
    states = jnp.zeros((N, D))
    for _ in range(N):
        states = jnp.tanh(X @ inner + jnp.pad(states, ((1, 0), (0, 0)))[:N] @ outer)
    np.testing.assert_allclose(states, MADE["recurrent"](X), atol=1e-5)


@pytest.mark.parametrize("dilation", [1, 3])
def test_convolutions_are_sums_over_the_positions_before(dilation):
    kernel = np.asarray(MADE["convolutional"].keywords["kernel"])
    depthwise, pointwise = (np.asarray(MADE["separable convolutional"].keywords[n]) for n in ("depthwise", "pointwise"))
    for name, matrices in (
        ("convolutional", kernel),
        ("separable convolutional", depthwise[:, :, None] * pointwise),
    ):
        expected = np.zeros((N, D))
        for t in range(N):
            for i in range(K):
                if t >= i * dilation:
                    expected[t] += X[t - i * dilation] @ matrices[i]
        np.testing.assert_allclose(MADE[name](X, dilation), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("self-attention", 1),
        ("recurrent", N - 1),
        ("convolutional", math.ceil(math.log(N, K))),
        ("separable convolutional", math.ceil(math.log(N, K))),
        ("restricted self-attention", math.ceil((N - 1) / (R // 2))),
    ],
)
def test_paths_are_as_long_as_they_must_be(name, length):
    layer = table1_layers.applied_once(MADE)[name]
    dilations = (lambda depth: K**depth) if "convolutional" in name else (lambda depth: 1)
    assert table1_layers.path_length(layer, N, D, dilations) == length


def test_without_dilation_a_convolution_s_path_is_the_longer():
    assert table1_layers.path_length(MADE["convolutional"], N, D) == math.ceil((N - 1) / (K - 1))


def test_a_position_that_is_never_reached_is_told():
    with pytest.raises(AssertionError, match="not reached"):
        table1_layers.path_length(lambda x, dilation: x, N, D)


def test_the_benchmark_runs(tmp_path):
    sizes = ["--lengths=32,64", "--path_lengths=16", "--width=8", "--heads=2", "--neighbourhood=6", "--repeats=1"]
    result = forked.run("benchmarks/table1.py", *sizes, f"--picture={tmp_path / 'table1.png'}")
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in LAYERS)
    assert (tmp_path / "table1.png").read_bytes().startswith(b"\x89PNG")

"""Table 1, measured: python benchmarks/table1.py [--lengths=512,1024,2048,4096] [--picture=table1.png].

Each kind of layer is timed as the sequence grows; the slope of the time over the length, both as logarithms, stands
beside the paper's exponent. What is timed is what the table counts: of self-attention the two products of equation 1
with their softmax, without projections. Then the longest path: how often a layer has to be applied until what stands
at the end of the sequence depends on what stood at its beginning, which is found by differentiating.
"""

import functools
import math
import pathlib
import sys
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import rich.console
import rich.table
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.timing import interleaved
from transformer_flax import cli
from transformer_flax.ablation.table1 import LAYERS
from transformer_flax.model.attention import attention_weights
from transformer_flax.model.neighbourhood import attend_nearby

LENGTHS = flags.DEFINE_list("lengths", ["512", "1024", "2048", "4096"], "n, of the sequences that are timed")
PATH_LENGTHS = flags.DEFINE_list("path_lengths", ["64", "256"], "n, of the sequences whose paths are measured")
WIDTH = flags.DEFINE_integer("width", 256, "d, of the representations")
HEADS = flags.DEFINE_integer("heads", 4, "of self-attention, which d divides among", 1)
KERNEL = flags.DEFINE_integer("kernel", 3, "k, positions that a convolution sees", 2)
NEIGHBOURHOOD = flags.DEFINE_integer("neighbourhood", 64, "r, positions that restricted self-attention sees", 2)
REPEATS = flags.DEFINE_integer("repeats", 15, "timed calls of each layer and length, of which the fastest counts", 1)
PICTURE = flags.DEFINE_string("picture", None, "draw the times into this file")

Apply = Callable[..., jax.Array]  # (x [n, d], dilation) -> [n, d]


def _attend(query, key, value, mask):
    return jnp.einsum("bhqm,bmhv->bqhv", attention_weights(query, key, mask), value)


def self_attention(x: jax.Array, dilation: int = 1, *, heads: int, r: int = 0) -> jax.Array:
    """Equation 1 of x with itself, in heads, to everything or to a neighbourhood of r."""
    split = x.reshape(1, len(x), heads, -1)
    mask = jnp.ones((1, 1, 1, len(x)), bool)
    mixed = attend_nearby(_attend, split, split, split, mask, r) if r else _attend(split, split, split, mask)
    return mixed.reshape(x.shape)


def recurrent(x: jax.Array, dilation: int = 1, *, inner: jax.Array, outer: jax.Array) -> jax.Array:
    """h_t = tanh(x_t U + h_(t-1) W), one position after the other."""

    def cell(state, x):
        state = jnp.tanh(x @ inner + state @ outer)
        return state, state

    return jax.lax.scan(cell, jnp.zeros(x.shape[1]), x)[1]


def recurrent_once(x: jax.Array, dilation: int = 1, *, inner: jax.Array, outer: jax.Array) -> jax.Array:
    """The same cell applied once at all positions: each state goes one position on."""
    return jnp.tanh(x @ inner + _shift(x, 1) @ outer)


def convolutional(x: jax.Array, dilation: int = 1, *, kernel: jax.Array) -> jax.Array:
    """sum_i x_(t - i dilation) W_i, with W [k, d, d]."""
    return sum((_shift(x, i * dilation) @ matrix for i, matrix in enumerate(kernel)), jnp.zeros(x.shape))


def separable(x: jax.Array, dilation: int = 1, *, depthwise: jax.Array, pointwise: jax.Array) -> jax.Array:
    """The same with W_i = diag(w_i) P: each feature for itself, w [k, d], then all features of a position, P [d, d]."""
    each = sum((_shift(x, i * dilation) * weights for i, weights in enumerate(depthwise)), jnp.zeros(x.shape))
    return each @ pointwise


def _shift(x: jax.Array, by: int) -> jax.Array:
    """x_(t - by), with zeros before the beginning."""
    return jnp.pad(x, ((by, 0), (0, 0)))[: len(x)]


def make_layers(d: int, heads: int, k: int, r: int) -> dict[str, Apply]:
    """The layers of table 1, by its names, with random parameters."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.array(rng.normal(size=shape) / math.sqrt(d), jnp.float32)

    return {
        "self-attention": functools.partial(self_attention, heads=heads),
        "recurrent": functools.partial(recurrent, inner=normal(d, d), outer=normal(d, d)),
        "convolutional": functools.partial(convolutional, kernel=normal(k, d, d)),
        "separable convolutional": functools.partial(separable, depthwise=normal(k, d), pointwise=normal(d, d)),
        "restricted self-attention": functools.partial(self_attention, heads=heads, r=r),
    }


def applied_once(layers: Mapping[str, Apply]) -> dict[str, Apply]:
    """The same layers as the operations that a path is made of."""
    whole: functools.partial = layers["recurrent"]  # pyrefly: ignore (all of them are)
    return {**layers, "recurrent": functools.partial(recurrent_once, **whole.keywords)}


def path_length(layer: Apply, n: int, d: int, dilations: Callable[[int], int] = lambda depth: 1) -> int:
    """How many of these layers it takes until the last position's output depends on the first position's input.

    Layer by layer, the derivative along what has been reached so far tells which positions are reached next; only which
    ones is kept, as far ones would soon be too small for a float.

    Args:
      layer: what is applied over and over.
      n: positions.
      d: features.
      dilations: that of a convolution at a depth, counted from 0.
    """
    derivative = jax.jit(
        lambda x, tangent, dilation: jax.jvp(lambda x: layer(x, dilation), (x,), (tangent,))[1], static_argnums=2
    )
    rng = np.random.default_rng(0)
    reached = np.arange(n) == 0
    for depth in range(n):
        x, direction = rng.normal(size=(2, n, d)).astype(np.float32)
        reached = np.any(derivative(x, direction * reached[:, None], dilations(depth)) != 0, axis=1)
        if reached[-1]:
            return depth + 1
    raise AssertionError(f"the last of {n} positions is not reached")


def slope(lengths: list[int], seconds: list[float]) -> float:
    """Of a line through the logarithms, by least squares."""
    return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])


def draw(seconds: Mapping[str, list[float]], lengths: list[int], file: str) -> None:
    figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in seconds.items():
        axes.loglog(lengths, values, marker="o", label=f"{name}: {slope(lengths, values):.2f}")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="n, length of the sequence", ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend(title="slope", fontsize=8)
    figure.savefig(file, dpi=120)


def main() -> None:
    d, k, r = WIDTH.value, KERNEL.value, NEIGHBOURHOOD.value
    lengths, path_lengths = (list(map(int, flag.value)) for flag in (LENGTHS, PATH_LENGTHS))
    layers = make_layers(d, HEADS.value, k, r)
    rng = np.random.default_rng(1)
    inputs = {n: jnp.array(rng.normal(size=(n, d)), jnp.float32) for n in lengths}
    calls = {(name, n): functools.partial(jax.jit(layer), inputs[n]) for name, layer in layers.items() for n in lengths}
    timings = interleaved(calls, REPEATS.value)
    # The fastest call: whatever else a machine does only adds to a time, and more to a short one.
    seconds = {name: [timings[name, n].low for n in lengths] for name in layers}

    columns = ["", *(f"n = {n:,}" for n in lengths), "slope", "paper"]
    columns += [column for n in path_lengths for column in (f"path, n = {n}", "paper")]
    table = rich.table.Table(*columns)
    once = applied_once(layers)
    for name, layer in LAYERS.items():
        dilations = (lambda depth: k**depth) if "convolutional" in name else (lambda depth: 1)
        cells = [f"{1000 * value:.2f} ms" for value in seconds[name]]
        cells += [f"{slope(lengths, seconds[name]):.2f}", f"{layer.exponent(d=d, k=k, r=r):g}"]
        for n in path_lengths:
            cells += [str(path_length(once[name], n, d, dilations)), f"{layer.costs(n, d, k, r).path:.2f}"]
        table.add_row(name, *cells)
    console = rich.console.Console(width=200)
    console.print(f"d = {d}, k = {k}, r = {r}, float32, {jax.devices()[0].device_kind}", table, sep="\n")
    if PICTURE.value:
        draw(seconds, lengths, PICTURE.value)


if __name__ == "__main__":
    cli.run(main)

"""Measures table 1: python benchmarks/table1.py [--lengths=512,1024,2048,4096] [--picture=table1.png].

Times each kind of layer as the sequence grows. Prints the slope of the time over the length, both as logarithms, beside
the paper's exponent. Only the operations that the table counts are timed: for self-attention, the two products of
equation 1 with their softmax, without projections. Then measures the longest path: the number of layers after which the
end of the sequence depends on its beginning, found by differentiating.
"""

import functools
import pathlib
import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import rich.console
import rich.table
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.table1_layers import LAYERS, applied_once, make_layers, path_length
from benchmarks.timing import interleaved
from transformer_flax import cli

LENGTHS = flags.DEFINE_list("lengths", ["512", "1024", "2048", "4096"], "n, lengths of the timed sequences")
PATH_LENGTHS = flags.DEFINE_list("path_lengths", ["64", "256"], "n, lengths of the sequences whose paths are measured")
WIDTH = flags.DEFINE_integer("width", 256, "d, width of the representations")
HEADS = flags.DEFINE_integer("heads", 4, "heads of self-attention; their number must divide d", 1)
KERNEL = flags.DEFINE_integer("kernel", 3, "k, positions that a convolution sees", 2)
NEIGHBOURHOOD = flags.DEFINE_integer("neighbourhood", 64, "r: restricted self-attention sees r / 2 on each side", 2)
REPEATS = flags.DEFINE_integer("repeats", 15, "timed calls of each layer and length; the fastest counts", 1)
PICTURE = flags.DEFINE_string("picture", None, "draw the times into this file")


def slope(lengths: list[int], costs: list[float]) -> float:
    """Returns the slope of a least-squares line through the logarithms."""
    return float(np.polyfit(np.log(lengths), np.log(costs), 1)[0])


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
    # The fastest call: other work of the machine only adds to a time, and more to a short one.
    seconds = {name: [timings[name, n].low for n in lengths] for name in layers}

    columns = ["", *(f"n = {n:,}" for n in lengths), "slope", "paper"]
    columns += [column for n in path_lengths for column in (f"path, n = {n}", "paper")]
    table = rich.table.Table(*columns)
    once = applied_once(layers)
    for name, costs in LAYERS.items():
        dilations = (lambda depth: k**depth) if "convolutional" in name else (lambda depth: 1)
        cells = [f"{1000 * value:.2f} ms" for value in seconds[name]]
        exponent = slope([4096, 8192], [costs(n, d, k, r).operations for n in (4096, 8192)])
        cells += [f"{slope(lengths, seconds[name]):.2f}", f"{exponent:g}"]
        for n in path_lengths:
            cells += [str(path_length(once[name], n, d, dilations)), f"{costs(n, d, k, r).path:.2f}"]
        table.add_row(name, *cells)
    console = rich.console.Console(width=200)
    console.print(f"d = {d}, k = {k}, r = {r}, float32, {jax.devices()[0].device_kind}", table, sep="\n")
    if PICTURE.value:
        draw(seconds, lengths, PICTURE.value)


if __name__ == "__main__":
    cli.run(main)

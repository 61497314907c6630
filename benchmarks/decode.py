"""Measures the search's speed: python benchmarks/decode.py [--sizes=small,base] [--beam_sizes=1,4] [--devices=1,2].

A random model translates random sentences into outputs of one forced length. Prints sentences and output tokens a
second: the median of interleaved calls, with the slowest and the fastest. If CTranslate2 is installed, it runs beside
them with the same model and length: on a CPU in float32 with as many threads, on a GPU in float16. --devices shares the
sentences among several devices; JAX_NUM_CPU_DEVICES=2 makes a CPU two devices.
"""

import ctypes
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.sizes import SIZES
from benchmarks.timing import interleaved
from transformer_flax import cli
from transformer_flax.decoding.inference import compile_rows, local_mesh, on_devices
from transformer_flax.decoding.search import Bounds, LengthPenalty, beam_search, greedy_search
from transformer_flax.decoding.translator import as_step
from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.registry import init_params
from transformer_flax.model.transformer import Transformer
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL, PAD_ID
from transformer_flax.training.config_checks import device_dtype

SIZE = flags.DEFINE_list("sizes", ["small", "base"], f"sizes of the model: {', '.join(SIZES)}")
BEAM_SIZE = flags.DEFINE_list("beam_sizes", ["1", "4"], "hypotheses of each sentence; 1 is greedy search")
DEVICES = flags.DEFINE_list("devices", ["1"], "numbers of devices that share the sentences")
BATCH = flags.DEFINE_integer("batch_size", 32, "sentences a batch")
LENGTH = flags.DEFINE_integer("length", 32, "tokens of each output")
SOURCE_LENGTH = flags.DEFINE_integer("source_length", 24, "tokens of each input")
PEER = flags.DEFINE_bool("ctranslate2", None, "also search with CTranslate2; default: if it can")
DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "type of the computation; default suits the device")
REPEATS = flags.DEFINE_integer("repeats", 5, "timed calls of each search")
JSON = flags.DEFINE_string("json", None, "write the figures to this file")


def make_search(model: Transformer, params, source, beam_size: int, length: int, num_devices: int = 1):
    """Returns a compiled search for outputs of exactly `length` tokens."""
    penalty = LengthPenalty("gnmt", 0.6)

    def search(params, source):
        step, cache = as_step(model, params, source, beam_size, length)
        exactly = jnp.full(len(source), length)
        bounds = Bounds(exactly, exactly, jnp.full((len(source), length), PAD_ID))
        if beam_size == 1:
            return greedy_search(step, cache, bounds, penalty)
        return beam_search(step, cache, bounds, penalty, beam_size=beam_size)

    program, _ = compile_rows(search, local_mesh(num_devices))
    return functools.partial(program, on_devices(params, num_devices), source)


def can_compare(dtype: str) -> bool:
    """Returns whether CTranslate2 is installed and would do the same work."""
    if not importlib.util.find_spec("ctranslate2"):
        return False
    if (jax.devices()[0].platform, dtype) != ("gpu", "bfloat16"):
        return (jax.devices()[0].platform, dtype) == ("cpu", "float32")
    import ctranslate2

    try:
        ctypes.CDLL("libcublas.so.12")  # of CUDA 12, which CTranslate2 needs beside the CUDA 13 of ".[cuda]"
    except OSError:
        return False
    return ctranslate2.get_cuda_device_count() > 0


def make_peer_search(config: TransformerConfig, params, source, beam_size: int, length: int):
    """Returns CTranslate2's search for outputs of `length` tokens, without the end symbol."""
    from benchmarks import ctranslate2_peer
    from transformer_flax.decoding import ctranslate2

    with tempfile.TemporaryDirectory() as folder:
        ctranslate2.save(config, params, [str(token) for token in range(config.vocab_size)], pathlib.Path(folder))
        threads = len(os.sched_getaffinity(0))  # as many as XLA uses
        options = {"threads": threads, "on_gpu": jax.devices()[0].platform == "gpu"}
        return ctranslate2_peer.make_search(pathlib.Path(folder), source, beam_size, length, **options)


def main() -> None:
    batch, length, dtype = BATCH.value, LENGTH.value, DTYPE.value or device_dtype()
    compare = can_compare(dtype) if PEER.value is None else PEER.value
    searches = {}
    for size in SIZE.value:
        config = dataclasses.replace(SIZES[size], dtype=dtype)
        model, params = Transformer(config), init_params(config, jax.random.key(0))
        source = np.random.default_rng(0).integers(NUM_SPECIAL, config.vocab_size, (batch, SOURCE_LENGTH.value))
        source = jnp.asarray(source, jnp.int32).at[:, -1].set(END_ID)
        for beam_size in map(int, BEAM_SIZE.value):
            name = f"{size}, beam {beam_size}"
            for num_devices in map(int, DEVICES.value):
                together = make_search(model, params, source, beam_size, length, num_devices)
                searches[f"{name}, {num_devices} devices" if num_devices > 1 else name] = together
            if compare:
                searches[f"{name}, CTranslate2"] = make_peer_search(config, params, source, beam_size, length)
    timings = interleaved(searches, REPEATS.value)
    table = rich.table.Table("search", "sentences a second", "tokens a second", "a step", "first call")
    for name, timing in timings.items():
        table.add_row(
            name,
            timing.per_second(batch),
            timing.per_second(batch * length),
            f"{1000 * timing.median / length:.2f} ms",
            f"{timing.first:.1f} s",
        )
    device = jax.devices()[0]
    about = f"{batch} sentences of {SOURCE_LENGTH.value} tokens into {length}, {dtype}, {device.device_kind}"
    console = rich.console.Console()
    console.print(about, table, sep="\n")
    ratios = {}
    for name, timing in timings.items():
        if peer := timings.get(f"{re.sub(', [0-9]+ devices', '', name)}, CTranslate2"):
            ratio, low, high = timing.times_as_fast_as(peer)
            ratios[name] = {"median": ratio, "low": low, "high": high}
            console.print(f"{name}: {ratio:.2f} ({low:.2f} to {high:.2f}) times as fast as CTranslate2")
    if JSON.value is not None:
        figures = {
            name: {"median": timing.median, "low": timing.low, "high": timing.high, "first": timing.first}
            for name, timing in timings.items()
        }
        figures = {"about": about, "seconds": figures, "times_as_fast_as_ctranslate2": ratios}
        pathlib.Path(JSON.value).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)

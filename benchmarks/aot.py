"""Estimates a step on an absent accelerator: python benchmarks/aot.py --topology=cuda:h100,cuda:h100x8,v5e:2x2.

Compiles the training step ahead of time, or with --what=search a beam search. Reads the program's kernels, the bytes
they move, their FLOPs by operand type, its collectives and its memory. Computes a roofline, which is a bound, not a
measurement. Each kernel takes the larger of its bytes over the memory bandwidth and its FLOPs over the peak of the data
sheet. "Likely" assumes 85 % of the bandwidth, 75 % of the peak and 1.5 microseconds a kernel. Kernels do not overlap,
and no cache keeps data between them. cuBLAS computes the products, because XLA chooses its own kernels by timing them.
A TPU's time is its compiler's estimate.

The figures of a search are those of one position: one decoder step for all hypotheses. They are the same at every
position, because attention reads the whole cache under a mask.

A GPU needs `pip install -e '.[cuda]'`, a TPU `.[tpu]`. A base step compiles in a minute of processor time for a
GPU, and in several for a TPU.
"""

import collections
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from absl import flags
from jax.experimental import topologies

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.hlo import Kernel, Program
from benchmarks.machines import MACHINES, Machine, cudnn_is_there
from benchmarks.sizes import SIZES
from configs import base
from transformer_flax import cli
from transformer_flax.decoding import search
from transformer_flax.decoding.translator import as_step
from transformer_flax.errors import UserError
from transformer_flax.model.config import IMPLEMENTATIONS, TransformerConfig
from transformer_flax.model.flops import training_flops
from transformer_flax.model.registry import init_params
from transformer_flax.model.transformer import Transformer
from transformer_flax.special_tokens import PAD_ID
from transformer_flax.training.loss import translation_loss
from transformer_flax.training.optimizer import make_optimizer
from transformer_flax.training.sharding import Parallel
from transformer_flax.training.step import TrainState, make_train_step

WHAT = flags.DEFINE_enum("what", "step", ["step", "search"], "the training step, or a beam search")
TOPOLOGY = flags.DEFINE_list("topology", ["cuda:h100"], "cuda:h100, cuda:h200 (append x8 for eight), or v5e:2x2")
SIZE = flags.DEFINE_enum("size", "base", list(SIZES), "size of the model")
ROWS = flags.DEFINE_integer("rows", 784, "pairs or sentences a batch, over all devices")
LENGTH = flags.DEFINE_integer("length", 32, "tokens a sentence; also the longest output of a search")
BEAM_SIZE = flags.DEFINE_integer("beam_size", 4, "hypotheses of each sentence in a search")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "type of the computation")
DROPOUT = flags.DEFINE_float("dropout", 0.1, "rate of dropout")
ATTENTION = flags.DEFINE_enum("attention", "plain", IMPLEMENTATIONS, "attention implementation of a step on a GPU")
CHUNKS = flags.DEFINE_integer("loss_chunks", 1, "chunks of the logits")
DEAREST = flags.DEFINE_integer("dearest", 20, "most expensive source lines to print")
HLO = flags.DEFINE_string("hlo", None, "write the compiled programs to this folder")
JSON = flags.DEFINE_string("json", None, "write the figures to this file")

BANDWIDTH, PEAK, LAUNCH = 0.85, 0.75, 1.5e-6  # likely shares of the data sheet's rates, and launch seconds
SHORT = 2e-6  # seconds; shorter kernels wait for their launch


def absent_devices(topology: str) -> tuple[Machine, list[jax.Device]]:
    """Returns the machine and the devices of a topology, for compiling only."""
    platform, _, rest = topology.partition(":")
    name, _, count = rest.partition("x") if platform == "cuda" else (platform, "", "")
    if name not in MACHINES:
        raise UserError(f"--topology={topology}: it must be one of cuda:h100, cuda:h200, cuda:h100x8, v5e:2x2")
    machine = MACHINES[name]
    module, extra = ("jax_cuda13_plugin", "cuda") if platform == "cuda" else ("libtpu", "tpu")
    if not importlib.util.find_spec(module):
        raise UserError(f"--topology={topology} needs {module}, which is not installed: pip install -e '.[{extra}]'")
    if platform == "cuda":
        options = {"topology": f"1x1x{count or 1}", "target_config": machine.description}
        return machine, topologies.get_topology_desc(name, platform, **options).devices
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other compilations are harmless
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to query
    return machine, topologies.get_topology_desc(topology, "tpu").devices


def lower_step(config: TransformerConfig, devices: list[jax.Device], rows: int, length: int, chunks: int = 1):
    """Lowers the training step of `config` for absent devices, on `rows` pairs of twice `length` tokens."""
    defaults, parallel = base.get_config(), Parallel(devices)
    defaults.model.d_model = config.d_model
    optimizer = make_optimizer(defaults)
    loss_fn = translation_loss(Transformer(config), defaults.label_smoothing, chunks)

    def init(key):
        return TrainState.create(0, init_params(config, key), optimizer)

    whole = jax.sharding.NamedSharding(parallel.mesh, jax.sharding.PartitionSpec())
    state = jax.eval_shape(init, jax.random.key(0))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state)
    batch = dict.fromkeys(("source", "target"), jax.ShapeDtypeStruct((rows, length), np.int32))
    step = parallel.compile(make_train_step(loss_fn, optimizer), donate_state=True)
    with cudnn_is_there() if config.attention_implementation == "cudnn" else contextlib.nullcontext():
        return step.lower(state, batch)


def lower_search(config: TransformerConfig, devices: list[jax.Device], rows: int, length: int, beam_size: int):
    """Lowers the search of one device, for its share of `rows` sentences, as one loop whose batch never shrinks."""
    model = Transformer(config)
    rows //= len(devices)

    def find(params, source):
        begun = as_step(model, params, source, beam_size, length)
        longest = jnp.full(rows, length)
        bounds = search.Bounds(jnp.ones_like(longest), longest, jnp.full((rows, length), PAD_ID))
        return search.beam_search(*begun, bounds, search.LengthPenalty("gnmt", 0.6), beam_size=beam_size)

    here = jax.sharding.SingleDeviceSharding(devices[0])
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params, source = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        (params, jax.ShapeDtypeStruct((rows, length), np.int32)),
    )
    with mock.patch.object(search, "SMALLEST", rows):
        return jax.jit(find).lower(params, source)


def compile_absent(lowered: Any, machine: Machine) -> Any:
    """Compiles for an absent machine."""
    return lowered.compile(compiler_options={} if machine.clock else {"xla_gpu_enable_triton_gemm": False})


def seconds(kernel: Kernel, machine: Machine, devices: int, *, likely: bool) -> float:
    """Returns the time of one launch of a kernel by the roofline; on a TPU, its compiler's estimate."""
    around = 2 * (devices - 1) / devices * kernel.collective / machine.link  # all-reduce in a ring
    if machine.clock:
        return kernel.cycles / machine.clock + around
    moved = kernel.bytes / machine.bandwidth + around
    computed = sum(flops / machine.flops(kind) for kind, flops in kernel.flops.items())
    return max(moved / BANDWIDTH, computed / PEAK) + LAUNCH if likely else max(moved, computed)


def sum_flops(kernels: list[Kernel], devices: int = 1) -> dict[str, float]:
    """Sums the FLOPs of products on one device by operand type."""
    found = collections.Counter()
    for kernel in kernels:
        found.update({kind: kernel.times * n / devices for kind, n in kernel.flops.items()})
    return dict(found)


def report(topology: str, config: TransformerConfig, console: rich.console.Console) -> dict:
    """Compiles for a topology, prints the program's figures and returns them."""
    machine, devices = absent_devices(topology)
    of_search = WHAT.value == "search"
    if of_search:
        lowered = lower_search(config, devices, ROWS.value, LENGTH.value, BEAM_SIZE.value)
    else:
        lowered = lower_step(config, devices, ROWS.value, LENGTH.value, CHUNKS.value)
    compiled = compile_absent(lowered, machine)
    if HLO.value:
        folder = pathlib.Path(HLO.value)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{topology.replace(':', '_')}.txt").write_text(compiled.as_text())

    def read(text: str) -> list[Kernel]:
        return max(Program(text).loops(), key=len) if of_search else Program(text).kernels()

    kernels = read(compiled.as_text())
    if machine.clock:
        # Copies to the fast memory have no cycles: they run beside the kernels. Products have become convolutions.
        kernels = [kernel for kernel in kernels if kernel.cycles or kernel.collective]
        flops = sum_flops(read(lowered.as_text(dialect="hlo")), 1 if of_search else len(devices))
    else:
        flops = sum_flops(kernels)
    memory = compiled.memory_analysis()
    times = {False: 0.0, True: 0.0}
    lines, short = collections.defaultdict(float), 0
    for kernel in kernels:
        for likely in times:
            times[likely] += kernel.times * seconds(kernel, machine, len(devices), likely=likely)
        bound = seconds(kernel, machine, len(devices), likely=False)
        short += kernel.times * (bound < SHORT)
        lines[kernel.line or kernel.opcode] += kernel.times * bound
    figures = {
        "kernels": sum(kernel.times for kernel in kernels),
        "short_kernels": short,
        "bytes": sum(kernel.times * kernel.bytes for kernel in kernels),
        "flops": flops,
        "collectives": sum(kernel.times for kernel in kernels if kernel.collective),
        "collective_bytes": sum(kernel.times * kernel.collective for kernel in kernels),
        "memory": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        "bound_ms": 1000 * times[False],
        "likely_ms": 1000 * times[True],
        "lines_ms": {line: 1000 * t for line, t in sorted(lines.items(), key=lambda item: -item[1])},
    }
    what = f"a position of a search with beam {BEAM_SIZE.value}" if of_search else "a step"
    console.print(
        f"[bold]{topology}[/] ({len(devices)} x {machine.name}), {SIZE.value}, {config.dtype}, {what}, "
        f"{ROWS.value} x ({LENGTH.value} + {LENGTH.value}) tokens"
    )
    by_type = ", ".join(f"{kind} {n / 1e12:.3g}" for kind, n in sorted(flops.items()))
    console.print(
        f"a device: {figures['kernels']:,} kernels ({short:,} below {SHORT * 1e6:.0f} us), "
        f"{figures['bytes'] / 1e9:.1f} GB, TFLOP by type: {by_type}; {figures['collectives']} collectives of "
        f"{figures['collective_bytes'] / 1e6:,.0f} MB; memory {figures['memory'] / 1e9:.2f} GB"
    )
    console.print("bound {bound_ms:.1f} ms, likely {likely_ms:.1f} ms".format(**figures))
    if not of_search:
        lengths = np.full(ROWS.value, LENGTH.value)
        model, peak = training_flops(config, lengths, lengths), len(devices) * machine.flops("bf16")
        mfu = {name: model / times[likely] / peak for name, likely in (("bound", False), ("likely", True))}
        figures |= {"model_flops": model, "mfu": mfu}
        console.print(
            f"model FLOPs, {model / 1e12:.3g} T, are {mfu['bound']:.0%} and {mfu['likely']:.0%} of the peak in bfloat16"
        )
    table = rich.table.Table("line", "bound, ms", "share")
    for line, t in list(figures["lines_ms"].items())[: DEAREST.value]:
        table.add_row(line, f"{t:.2f}", f"{t / figures['bound_ms']:.1%}")
    console.print(table)
    return figures


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # the process itself needs no accelerator
    config = dataclasses.replace(
        SIZES[SIZE.value], dtype=DTYPE.value, dropout=DROPOUT.value, attention_implementation=ATTENTION.value
    )
    console = rich.console.Console(width=120)
    figures = {topology: report(topology, config, console) for topology in TOPOLOGY.value}
    if JSON.value is not None:
        pathlib.Path(JSON.value).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)

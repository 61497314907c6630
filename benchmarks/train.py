"""Measures the speed of the training step: python benchmarks/train.py [--sizes=small,base] [--json=FILE].

Uses a batch without padding. Prints model FLOPs a second (`model.flops`) and their share of the rate of a large matrix
product, which is measured in the same run. If PyTorch is installed, its `nn.Transformer` does the same work beside
ours. The figures are medians of interleaved calls, with the slowest and the fastest.
"""

import dataclasses
import importlib.util
import json
import pathlib
import sys
import tempfile
import time

import jax
import numpy as np
import rich.console
import rich.table
from absl import flags
from jax.experimental.compilation_cache import compilation_cache

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.sizes import SIZES
from benchmarks.timing import interleaved
from configs import base
from transformer_flax import cli
from transformer_flax.malloc import keep_memory
from transformer_flax.model.config import IMPLEMENTATIONS, TransformerConfig
from transformer_flax.model.config import REMAT as REMAT_POLICIES
from transformer_flax.model.flops import training_flops
from transformer_flax.model.registry import init_params
from transformer_flax.model.transformer import Transformer
from transformer_flax.special_tokens import NUM_SPECIAL
from transformer_flax.training.config_checks import device_dtype
from transformer_flax.training.loss import translation_loss
from transformer_flax.training.optimizer import make_optimizer
from transformer_flax.training.peak_flops import data_sheet_flops, large_product
from transformer_flax.training.sharding import make_parallel
from transformer_flax.training.step import TrainState, make_train_step

PEERS = {"pytorch": False, "pytorch compiled": True}  # whether `torch.compile` compiles the loss
SIZE = flags.DEFINE_list("sizes", ["base", "small", "tiny"], f"sizes of the model: {', '.join(SIZES)}")
PEER = flags.DEFINE_list("peers", None, f"peers beside ours: {', '.join(PEERS)}; default: all that are installed")
ROWS = flags.DEFINE_integer("rows", None, "pairs a batch; default: small 64, others 32; on an accelerator 784")
LENGTH = flags.DEFINE_integer("length", 32, "tokens a sentence")
DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "type of the computation; default suits the device")
STEPS = flags.DEFINE_integer("steps", 1, "steps of each timed call; use many if one is very short")
REPEATS = flags.DEFINE_integer("repeats", 11, "timed calls; 0: only memory and compilation", 0)
ACCUMULATION = flags.DEFINE_integer("accumulation_steps", 1, "micro-batches of our step", 1)
CHUNKS = flags.DEFINE_integer("loss_chunks", 1, "chunks of our logits", 1)
SCAN = flags.DEFINE_bool("scan_layers", False, "scan our layers")
ATTENTION = flags.DEFINE_list("attention", ["plain"], f"our attention implementations: {', '.join(IMPLEMENTATIONS)}")
REMAT = flags.DEFINE_enum("remat", "none", REMAT_POLICIES, "what our layers keep for gradients")
DROPOUT = flags.DEFINE_float("dropout", 0.1, "rate of dropout")
JSON = flags.DEFINE_string("json", None, "write the figures to this file")


def make_batch(config: TransformerConfig, rows: int, length: int) -> dict[str, np.ndarray]:
    """Draws random tokens without padding."""
    tokens = np.random.default_rng(0).integers(NUM_SPECIAL, config.vocab_size, (2, rows, length), dtype=np.int32)
    return dict(zip(("source", "target"), tokens, strict=True))


class Step:
    """The training step as the loop compiles it, executed `steps` times a call."""

    def __init__(self, config: TransformerConfig, batch: dict[str, np.ndarray], steps: int):
        defaults = base.get_config()
        parallel = make_parallel(defaults.parallel, len(batch["source"]), ACCUMULATION.value, CHUNKS.value)
        defaults.model.d_model = config.d_model
        optimizer = make_optimizer(defaults)
        loss_fn = translation_loss(Transformer(config), defaults.label_smoothing, CHUNKS.value)
        train_step = make_train_step(loss_fn, optimizer, accumulation_steps=ACCUMULATION.value)
        train_step = parallel.compile(train_step, donate_state=True)
        params = init_params(config, jax.random.key(0))
        self._state = parallel.place(TrainState.create(0, params, optimizer))
        self._batch, self._steps = parallel.shard(batch), steps
        with tempfile.TemporaryDirectory() as cache:
            jax.config.update("jax_compilation_cache_dir", cache)
            compilation_cache.reset_cache()
            self.compile_cold, self._step = self._compile(train_step)
            jax.clear_caches()
            self.compile_cached, _ = self._compile(train_step)
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()
        memory = self._step.memory_analysis()
        parts = ("argument", "output", "temp")
        self.memory = sum(getattr(memory, f"{part}_size_in_bytes") for part in parts) - memory.alias_size_in_bytes

    def _compile(self, train_step):
        started = time.perf_counter()
        lowered = train_step.lower(self._state, self._batch)
        compiled = lowered.compile()
        return time.perf_counter() - started, compiled

    def __call__(self):
        for _ in range(self._steps):
            self._state, metrics = self._step(self._state, self._batch)
        return metrics.sums["loss"]


def main() -> None:
    keep_memory()  # as training does
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    dtype = DTYPE.value or device_dtype()
    installed = PEERS if importlib.util.find_spec("torch") else ()
    peers = installed if PEER.value is None else PEER.value
    product, product_flops = large_product(dtype, repeats=10)  # the first ones are slower
    functions, flops, tokens, steps = {"a matrix product": product}, {}, {}, {}
    for size in SIZE.value:
        config = dataclasses.replace(
            SIZES[size],
            dtype=dtype,
            dropout=DROPOUT.value,
            scan_layers=SCAN.value,
            remat=REMAT.value,
        )
        batch = make_batch(config, ROWS.value or ({"small": 64}.get(size, 32) if on_cpu else 784), LENGTH.value)
        for attention in ATTENTION.value:
            name = f"{size}, {attention}" if len(ATTENTION.value) > 1 else size
            chosen = dataclasses.replace(config, attention_implementation=attention)
            functions[name] = steps[name] = Step(chosen, batch, STEPS.value)
        if peers:
            from benchmarks.pytorch import make_step

            for peer in peers:
                smoothing = base.get_config().label_smoothing
                step = make_step(config, batch, label_smoothing=smoothing, compiled=PEERS[peer])
                functions[f"{size}, {peer}"] = lambda step=step: [step() for _ in range(STEPS.value)][-1]
        lengths = np.full(len(batch["source"]), LENGTH.value)
        for name in [name for name in functions if name not in flops and name != "a matrix product"]:
            flops[name] = STEPS.value * training_flops(config, lengths, lengths)
            tokens[name] = STEPS.value * 2 * batch["source"].size

    console, figures = rich.console.Console(), {name: {} for name in flops}
    about = f"{jax.device_count()} x {device.device_kind}, {dtype}, dropout {DROPOUT.value}"
    console.print(about)
    result = {"about": about, "steps": figures}
    if REPEATS.value:
        timings = interleaved(functions, REPEATS.value)
        result["peak_flops_per_second"] = peak = product_flops / timings["a matrix product"].median
        console.print(f"a large matrix product: {peak / 1e9:,.1f} GFLOP/s")
        sheet = data_sheet_flops(device.device_kind, dtype)
        shares = ["share of the product's rate", *(["of the data sheet's"] if sheet else [])]
        table = rich.table.Table("step", "ms", "tokens a second", "model GFLOP/s", *shares)
        for name in flops:
            timing = timings[name]
            milliseconds = [1000 * seconds / STEPS.value for seconds in (timing.median, timing.low, timing.high)]
            share = flops[name] / timing.median / peak
            table.add_row(
                name,
                "{:,.1f} ({:,.1f} to {:,.1f})".format(*milliseconds),
                f"{tokens[name] / timing.median:,.0f}",
                f"{flops[name] / timing.median / 1e9:,.1f}",
                f"{share:.1%}",
                *([f"{share * peak / sheet:.1%}"] if sheet else []),
            )
            figures[name] |= {
                "milliseconds": dict(zip(("median", "low", "high"), milliseconds, strict=True)),
                "tokens_per_second": tokens[name] / timing.median,
                "flops_per_second": flops[name] / timing.median,
                "share_of_peak": share,
                "share_of_data_sheet": share * peak / sheet if sheet else None,
            }
        console.print(table)
    table = rich.table.Table("step", "memory, MB", "compiled in", "compiled before")
    for name, step in steps.items():
        table.add_row(name, f"{step.memory / 1e6:,.0f}", f"{step.compile_cold:.1f} s", f"{step.compile_cached:.1f} s")
        figures[name] |= {
            "bytes": step.memory,
            "compile_seconds": {"cold": step.compile_cold, "cached": step.compile_cached},
        }
    console.print(table)
    if JSON.value is not None:
        pathlib.Path(JSON.value).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)

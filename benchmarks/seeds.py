"""Measures the speed-up of seeds as one program: python benchmarks/seeds.py [--config=... --counts=8 --json=FILE].

Compares the update of `train.py --seeds=8`, on one batch a seed, with as many updates one after another. Prints
the time of a step and the ratio: medians of interleaved calls, with the slowest and the fastest.
"""

import json
import pathlib
import sys

import jax
import numpy as np
import rich.console
import rich.table
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.timing import interleaved
from transformer_flax import cli
from transformer_flax.arguments import define_config
from transformer_flax.model.registry import init_params, make_model
from transformer_flax.special_tokens import NUM_SPECIAL
from transformer_flax.training.compiled import Steps
from transformer_flax.training.config_checks import model_config
from transformer_flax.training.optimizer import keeps_average
from transformer_flax.training.setup import checked_config
from transformer_flax.training.sharding import make_parallel
from transformer_flax.training.step import TrainState, init_key
from transformer_flax.training.vectorized_seeds import check_seeds, stack_trees

CONFIG = define_config("table3_small.py")
COUNTS = flags.DEFINE_list("counts", ["2", "4", "8"], "numbers of seeds at once")
LENGTH = flags.DEFINE_integer("length", 20, "tokens a sentence")
STEPS = flags.DEFINE_integer("steps", 5, "steps of each timed call")
REPEATS = flags.DEFINE_integer("repeats", 7, "timed calls")
JSON = flags.DEFINE_string("json", None, "write the figures to this file")


class Together:
    """Updates `count` seeds at once, in --steps steps a call."""

    def __init__(self, config, count: int):
        model = model_config(config, config.data.vocab_size)
        parts = config.accumulation_steps, config.loss_chunks
        multiple = config.data.rows_multiple_of
        parallel = make_parallel(config.parallel, multiple, *parts)
        together = parallel if count == 1 else parallel.behind_seeds()
        steps = Steps(config, make_model(model), parallel)
        self._step = steps.train_step if count == 1 else steps.seeds_step
        keep_ema = keeps_average(config)
        states = [
            TrainState.create(seed, init_params(model, init_key(seed)), steps.optimizer, keep_ema=keep_ema)
            for seed in range(count)
        ]
        self._state = parallel.place(states[0] if count == 1 else stack_trees(states))
        rows = config.data.tokens_per_batch // LENGTH.value // multiple * multiple
        rng = np.random.default_rng(0)
        shape = (rows, LENGTH.value)
        batches = [
            {side: rng.integers(NUM_SPECIAL, model.vocab_size, shape, np.int32) for side in ("source", "target")}
            for _ in range(count)
        ]
        self._batch = together.shard(batches[0] if count == 1 else stack_trees(batches))

    def __call__(self):
        for _ in range(STEPS.value):
            self._state, metrics = self._step(self._state, self._batch)
            if jax.default_backend() == "cpu":  # as in the loop
                jax.block_until_ready(metrics)
        return metrics.sums["loss"]


def main() -> None:
    config = checked_config(CONFIG())
    counts = [1, *(int(count) for count in COUNTS.value)]
    check_seeds(config)
    timings = interleaved({str(count): Together(config, count) for count in counts}, REPEATS.value)
    console = rich.console.Console()
    about = f"{config.name}, {config.model.dtype}, {jax.device_count()} x {jax.devices()[0].device_kind}"
    console.print(about)
    table = rich.table.Table("seeds at once", "ms a step", "times as fast as one after another")
    figures = {}
    for count in counts:
        timing = timings[str(count)]
        ratio, low, high = (count * each for each in timing.times_as_fast_as(timings["1"]))
        milliseconds = [1000 * seconds / STEPS.value for seconds in (timing.median, timing.low, timing.high)]
        figures[count] = {"milliseconds": milliseconds, "times_as_fast": [ratio, low, high]}
        table.add_row(
            str(count), "{:,.1f} ({:,.1f} to {:,.1f})".format(*milliseconds), f"{ratio:.2f} ({low:.2f} to {high:.2f})"
        )
    console.print(table)
    if JSON.value is not None:
        pathlib.Path(JSON.value).write_text(json.dumps({"about": about, "seeds": figures}, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)

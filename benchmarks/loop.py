"""What the loop costs beside its steps: python benchmarks/loop.py [--config=... --config.data.path=FOLDER].

A run is trained as `train.py` trains it, some steps at a time; after each time, the bare step makes the same updates on
the same batches, which lie on the device. The ratio tells what data, logging, checkpoints and the loop itself cost.
Evaluations, and steps that compile, are left out.
"""

import pathlib
import statistics
import sys
import tempfile
import time

import jax
import rich.console
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from transformer_flax import cli
from transformer_flax.training.loop import Trainer
from transformer_flax.training.metrics import read_lines
from transformer_flax.training.parallel import make_parallel
from transformer_flax.training.prepare import prepare_data
from transformer_flax.training.progress import Progress
from transformer_flax.training.workdir import Workdir

CONFIG = cli.define_config(pathlib.Path(__file__).parent.parent / "configs/numbers.py")
STEPS = flags.DEFINE_integer("steps", 100, "timed at a time")
REPEATS = flags.DEFINE_integer("repeats", 5, "times")
WARM = 20  # steps at the start of each time, until data are ahead and the machine is warm


class Bench:
    """A trainer that goes on and on, and its bare step."""

    def __init__(self, config, folder: pathlib.Path):
        self._config, self._workdir = config, Workdir(folder)
        config.eval.every, config.eval.sentences, config.eval.test, config.eval.final_average = 0, 1, False, 1
        config.log.every = WARM
        config.parallel.mode = "jit"
        progress = Progress(quiet=True)
        self._parallel = make_parallel(config.parallel, config.data.rows_multiple_of, config.accumulation_steps)
        self._data = prepare_data(config, self._workdir, progress)
        self._trainer = Trainer(config, self._workdir, self._data, self._parallel, progress)

    def loop(self, start: int, stop: int) -> float:
        """Seconds of the steps start + WARM + 1 to stop, in the loop."""
        self._config.steps = stop
        self._trainer.run()
        seconds = {line["step"]: line["seconds"] for line in read_lines(self._workdir.metrics_file)}
        return seconds[stop] - seconds[start + WARM]

    def bare(self, start: int, stop: int) -> float:
        """Seconds of the same steps without anything else."""
        state = self._parallel.place(self._trainer._init())
        batches = [self._parallel.shard(self._data.train[step]) for step in range(start, stop)]
        for batch in batches[:WARM]:
            state, _ = self._trainer._train_step(state, batch)
        jax.block_until_ready(state)
        started = time.perf_counter()
        for batch in batches[WARM:]:
            state, metrics = self._trainer._train_step(state, batch)
            jax.block_until_ready(metrics)
        return time.perf_counter() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(CONFIG.value, pathlib.Path(folder) / "run")
        span = WARM + STEPS.value
        bench.loop(0, span)  # compiles most shapes
        ratios = []
        for repeat in range(1, REPEATS.value + 1):
            start, stop = repeat * span, (repeat + 1) * span
            bench.bare(start, stop)  # compiles what is left
            ratios.append(bench.loop(start, stop) / bench.bare(start, stop))
    rich.console.Console(highlight=False).print(
        f"the loop takes {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) times as long as its "
        f"{STEPS.value} steps alone"
    )


if __name__ == "__main__":
    cli.run(main)

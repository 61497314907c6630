"""Measures the overhead of the loop: python benchmarks/loop.py [--config=... --config.data.path=FOLDER --json=FILE].

Trains a run as `train.py` does, in sections of some steps. After each section, the bare step makes as many updates on
the same batches, which are already on the device. The ratio of the times shows the cost of data, logging, checkpoints
and the loop itself. Evaluations and steps that compile are left out.
"""

import json
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
from transformer_flax.arguments import define_config
from transformer_flax.console import Progress
from transformer_flax.files import read_json_lines
from transformer_flax.training.compiled import Programs
from transformer_flax.training.loop import fit, open_trainer
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.setup import checked_config, prepare_run, set_up_devices

CONFIG = define_config("numbers.py")
STEPS = flags.DEFINE_integer("steps", 100, "timed steps of each section")
REPEATS = flags.DEFINE_integer("repeats", 5, "sections")
JSON = flags.DEFINE_string("json", None, "write the figures to this file")
WARM = 20  # steps at the start of each section, until data are ahead and the machine is warm; the interval of logs
flags.register_validator("steps", lambda steps: steps > 0 and steps % WARM == 0, f"must be a multiple of {WARM}")


class Bench:
    """A run that is resumed for each section, and its bare step."""

    def __init__(self, config, folder: pathlib.Path):
        config.eval.update(every=0, patience=0, test=False, final_average=1, final_sentences=1)
        config.decode.update(beam_size=1, max_extra_length=0)  # the end of a run is evaluated in any case
        config.log.every = WARM
        config.parallel.mode = "jit"
        self._progress = Progress(quiet=True)
        config = checked_config(config)
        self._parallel = set_up_devices(config, self._progress)
        self._run = prepare_run(config, RunDirectory(folder), self._progress)
        self._programs = Programs(self._run, self._parallel, self._progress)

    def loop(self, start: int, stop: int) -> float:
        """Returns the seconds of the steps start + WARM + 1 to stop in the loop."""
        self._run.config.steps = stop
        with open_trainer(self._run, self._programs, self._progress) as (trainer, state):
            fit(trainer, state)
        lines = read_json_lines(self._run.directory.metrics_file)
        seconds = {line["step"]: line["seconds"] for line in lines if "train/learning_rate" in line}
        return seconds[stop] - seconds[start + WARM]

    def bare(self, start: int, stop: int) -> float:
        """Returns the seconds of the same steps without anything else."""
        state = self._parallel.place(self._programs.init(0))
        batches = [self._parallel.shard(self._run.train[step]) for step in range(start, stop)]
        for batch in batches[:WARM]:
            state, _ = self._programs.steps.train_step(state, batch)
        jax.block_until_ready(state)
        started = time.perf_counter()
        for batch in batches[WARM:]:
            state, _ = self._programs.steps.train_step(state, batch)
            if jax.default_backend() == "cpu":  # as in the loop
                jax.block_until_ready(state)
        jax.block_until_ready(state)
        return time.perf_counter() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(CONFIG(), pathlib.Path(folder) / "run")
        span = WARM + STEPS.value
        bench.loop(0, span)  # compiles most shapes
        ratios = []
        for repeat in range(1, REPEATS.value + 1):
            start, stop = repeat * span, (repeat + 1) * span
            bench.bare(start, stop)  # compiles the rest
            ratios.append(bench.loop(start, stop) / bench.bare(start, stop))
    figures = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    rich.console.Console(highlight=False).print(
        "the loop takes {median:.3f} ({low:.3f} to {high:.3f}) times as long as its {steps} steps alone".format(
            **figures, steps=STEPS.value
        )
    )
    if JSON.value is not None:
        figures = {"config": CONFIG().name, "steps": STEPS.value, "loop_to_bare": figures}
        pathlib.Path(JSON.value).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)

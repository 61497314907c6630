"""Sweeps on a small text: the command as a process, and runs that are trained in this process."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import time

from tests.forked import PATIENCE, Forked
from transformer_flax.ablation.results import Result
from transformer_flax.training.loop import train
from transformer_flax.training.vectorized_seeds import train_seeds

CONFIG = """
from tests.training.small import small_config

def get_config():
    config = small_config(data__path={text!r}, data__cache_dir={cache!r}, steps=200, eval__every=100,
                          checkpoint__every=50, log__every=10, optimizer__warmup_steps=50)
    config.model.d_ff = 1 * config.model.get_ref("d_model")
    return config
"""


def sweeping(config, workdir, *arguments) -> Forked:
    """python -m transformer_flax.sweep as it runs; a context."""
    line = [f"--config={config}", f"--workdir={workdir}", *arguments]
    return Forked("transformer_flax.sweep", *line, PYTHONUNBUFFERED="1", TERM="dumb")


def run(config, workdir, *arguments) -> tuple[int | None, str]:
    """Its exit status and what it has put out."""
    with sweeping(config, workdir, *arguments) as process:
        process.wait()
        return process.status, process.said


def wait_for(log: pathlib.Path, text: str) -> None:
    """Waits until a log has this text."""
    until = time.monotonic() + PATIENCE
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < until, f"{text!r} was not said"
        time.sleep(0.02)


def stop_all(process: Forked) -> None:
    """SIGTERM to a sweep and to all runs that it trains, as a container's stop sends it."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGTERM)


def timeless(result: Result) -> Result:
    """It without what the clock has to do with, and FLOPs, of which not every step is timed."""
    curve = [point | {"seconds": 0.0} for point in result.curve]
    return dataclasses.replace(result, seconds=0.0, flops=0.0, curve=curve)


class InProcess:
    """A launcher that trains in this process, which has imported JAX already."""

    at_a_time = 1

    def __init__(self):
        self._jobs = []

    def left_behind(self):
        return ""

    def submit(self, jobs):
        self._jobs = list(jobs)

    def started(self):
        return self._jobs[:1]

    def poll(self):
        job = self._jobs.pop(0)
        first = job.trials[0]
        if len(job.trials) > 1:
            train_seeds(first.variant.config, [trial.seed for trial in job.trials], first.path.parent)
        else:
            config = first.variant.config.copy_and_resolve_references()
            config.seed = first.seed
            train(config, first.path)
        return [(job, "")]

    def stop(self):
        return "its runs have ended"

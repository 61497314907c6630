"""The command of a sweep as a process, on a small text."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys

from tests.commands.process import ENVIRONMENT, PATIENCE, ROOT
from transformer_flax.ablation.results import Result

CONFIG = """
from tests.training.small import small_config

def get_config():
    return small_config(data__path={text!r}, data__cache_dir={cache!r}, steps=200, eval__every=100,
                        checkpoint__every=50, log__every=10, optimizer__warmup_steps=50)
"""
MEMORY = 8 << 20  # KiB


@contextlib.contextmanager
def sweeping(config, workdir, *arguments):
    """python -m transformer_flax.sweep as it runs, with little memory; it does not outlive the context."""
    command = [sys.executable, "-m", "transformer_flax.sweep", f"--config={config}", f"--workdir={workdir}", *arguments]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        ["sh", "-c", f'ulimit -v {MEMORY}; exec "$@"', "sh", *command],
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
        **pipe,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(config, workdir, *arguments) -> tuple[int, str]:
    with sweeping(config, workdir, *arguments) as process:
        said, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, said


def stop_all(process: subprocess.Popen) -> None:
    """SIGTERM to a sweep and to all runs that it trains, as a container's stop sends it."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGTERM)


def timeless(result: Result) -> Result:
    """It without what the clock has to do with, and FLOPs, of which not every step is timed."""
    curve = [[point[0], *point[2:]] for point in result.curve]
    return dataclasses.replace(result, seconds=0.0, flops=0.0, curve=curve)

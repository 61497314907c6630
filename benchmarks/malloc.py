"""Times a training step by malloc's settings: python benchmarks/malloc.py [--sizes=tiny,small,base] [--rounds=5].

The settings are made when a process starts, so each measurement is a new process of `benchmarks/train.py`. Each round
measures the system's settings, then those of `transformer_flax.malloc`. For CPUs only.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import rich.console
import rich.progress
import rich.table
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from transformer_flax import cli
from transformer_flax.malloc import SWITCH

ROOT = pathlib.Path(__file__).parent.parent
BATCHES = {"tiny": (128, 16), "small": (64, 32), "base": (32, 32)}  # pairs a batch, tokens a sentence
SIZE = flags.DEFINE_list("sizes", list(BATCHES), "sizes of the model")
ROUNDS = flags.DEFINE_integer("rounds", 5, "processes with each setting", 1)


def measure(size: str, allocator: str) -> tuple[float, float]:
    """Returns the milliseconds of a step and the peak memory of its process in megabytes."""
    rows, length = BATCHES[size]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, str(ROOT / "benchmarks/train.py"), f"--sizes={size}", "--peers=", f"--rows={rows}"]
        command += [f"--length={length}", "--repeats=7", f"--json={file.name}"]
        process = subprocess.Popen(command, env=environment | {SWITCH: allocator}, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        found = json.loads(pathlib.Path(file.name).read_text())
    return found["steps"][size]["milliseconds"]["median"], usage.ru_maxrss / 1024


def main() -> None:
    console = rich.console.Console()
    table = rich.table.Table("size", "ms, system's", "ms, kept", "times as fast", "MB, system's", "MB, kept")
    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as progress:
        task = progress.add_task("timing", total=len(SIZE.value) * ROUNDS.value)
        for size in SIZE.value:
            rounds = []
            for _ in range(ROUNDS.value):
                rounds.append((measure(size, "system"), measure(size, "")))
                progress.advance(task)
            ratios = [system[0] / kept[0] for system, kept in rounds]
            columns = [statistics.median(each[kind][what] for each in rounds) for what in (0, 1) for kind in (0, 1)]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            table.add_row(size, *(f"{value:,.1f}" for value in columns[:2]), ratio, *(f"{v:,.0f}" for v in columns[2:]))
    console.print(table)


if __name__ == "__main__":
    cli.run(main)

"""Kills a sweep over and over: python -m tests.faults.sweeps --kills=30 [--signal=TERM].

It is killed with SIGKILL at random instants, and started again at once, while the runs that it leaves behind save their
step; at times half a line is left in its results. It must go on each time, and end with the very results of a sweep
that nobody has touched.

With SIGTERM, which all its processes get at once, each run must resume from the very step that it said it stopped at.
"""

import collections
import itertools
import json
import operator
import pathlib
import random
import re
import signal
import sys
import tempfile
import time

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # for configs/, which is not part of the package

from tests.ablation.sweeping import CONFIG, run, stop_all, sweeping, timeless
from tests.training.small import write_text
from transformer_flax.ablation.results import Result, read

ARGUMENTS = ("--rows=base,D-drop0.0", "--seeds=2", "--jobs=2")
HALF_A_LINE = b'{"variant": "D-dr'


def results(workdir: pathlib.Path) -> list[Result]:
    """Those of all runs, whichever ended first."""
    found = read(workdir / "results.jsonl")[1]
    return sorted(map(timeless, found), key=operator.attrgetter("variant", "seed"))


def require_nothing_lost(workdir: pathlib.Path) -> int:
    """Counts how often runs resumed from where they had stopped.

    Raises:
      AssertionError: one resumed from an earlier step.
    """
    count = 0
    for log in workdir.glob("*/*.log"):
        said = re.findall(r"(stopped by|resuming from).*? step ([\d,]*\d)", log.read_text())
        for (what, step), (_, resumed) in itertools.pairwise(said):
            if what == "stopped by":
                assert step == resumed, f"{log}: stopped at step {step}, resumed from {resumed}"
                count += 1
    return count


def kill_and_go_on(
    config: pathlib.Path, workdir: pathlib.Path, rng: random.Random, seconds: float, number: int
) -> dict[str, int]:
    """Starts a sweep until it ends by itself; counts what happened.

    Args:
      config: what is swept.
      workdir: where.
      rng: rules when it is killed.
      seconds: that it may run at a time, at most.
      number: the signal.

    Raises:
      AssertionError: it did not go on.
    """
    counts: collections.Counter[str] = collections.Counter()
    while True:
        with sweeping(config, workdir, *ARGUMENTS) as process:
            until = time.monotonic() + rng.uniform(0, seconds)
            while process.status is None and time.monotonic() < until:
                time.sleep(0.05)
            if process.status is not None:
                assert process.status == 0, process.said
                if number != signal.SIGKILL:
                    counts["steps resumed from"] = require_nothing_lost(workdir)
                return dict(counts)
            process.send_signal(number) if number == signal.SIGKILL else stop_all(process)
            process.wait()
            said = process.said
        counts["kills"] += 1
        counts["waited for runs left behind"] += "waiting for the runs of an earlier sweep" in said
        file = workdir / "results.jsonl"
        if file.exists() and rng.random() < 0.3:
            with file.open("ab") as stream:
                stream.write(HALF_A_LINE)
            counts["half a line left"] += 1


def main(_) -> None:
    rng = random.Random(SEED.value)
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        (folder / "text").mkdir()
        config = folder / "config.py"
        config.write_text(CONFIG.format(text=str(write_text(folder / "text")), cache=str(folder / "cache")))
        started = time.monotonic()
        status, said = run(config, folder / "untouched", *ARGUMENTS)
        assert status == 0, said
        seconds = time.monotonic() - started
        expected = results(folder / "untouched")
        while counts["kills"] < KILLS.value:
            workdir = folder / f"sweep{counts['sweeps']}"
            counts.update(kill_and_go_on(config, workdir, rng, seconds * 2 / 3, signal.Signals[f"SIG{SIGNAL.value}"]))
            assert results(workdir) == expected, f"{results(workdir)}\nnot {expected}"
            counts["sweeps"] += 1
    print(json.dumps(counts, indent=2))


if __name__ == "__main__":
    KILLS = flags.DEFINE_integer("kills", 30, "least number of kills")
    SIGNAL = flags.DEFINE_enum("signal", "KILL", ["KILL", "TERM"], "signal to send")
    SEED = flags.DEFINE_integer("seed", 0, "seed of the instants at which sweeps are killed")
    app.run(main)

"""Kills a run over and over: python -m tests.faults.campaign --kills=200 [--signal=TERM] [--json=FILE].

Each run is killed a few times, at random instants or as soon as a checkpoint is being written, and started again; it
must go on each time, and end with the very parameters, metrics and translations of a run that nobody has touched.
"""

import collections
import contextlib
import json
import logging
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import time

import jax
import rich.console
import rich.progress
import rich.table
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # for configs/, which is not part of the package

from tests.forked import PROCESSES
from tests.training.small import final_state, small_config, timeless, write_text
from transformer_flax import cli
from transformer_flax.errors import Interrupted
from transformer_flax.files import read_json_lines
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.loop import train

MODES = {
    "one device": {"parallel__num_devices": 1},
    "jit, 2 devices": {"parallel__num_devices": 2, "data__num_buckets": 2},
    "pmap, 2 devices": {"parallel__mode": "pmap", "parallel__num_devices": 2},
    "accumulation": {"accumulation_steps": 4},
    "packed": {"data__batching": "packed", "parallel__num_devices": 2},
    "moving average": {"ema_decay": 0.9, "data__num_buckets": 2},
    "average of 2": {"eval__average": 2, "checkpoint__keep": 3},
}
RUN = {"steps": 40, "checkpoint__every": 5, "eval__every": 12, "log__every": 3, "data__tokens_per_batch": 4096}
KILLS_A_RUN = 4
PATIENCE = 300  # seconds that a run may take from its start to its end


def start(workdir: pathlib.Path, log: pathlib.Path, overrides: dict) -> None:
    """A run in a process of its own, its output in a file."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(workdir.parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as the command has it
    try:
        train(small_config(**RUN | overrides), workdir)
    except Interrupted as interruption:
        print(interruption)
        sys.exit(interruption.exit_status)


class Campaign:
    """Runs of one mode that are killed and go on.

    Args:
      folder: for all their files.
      overrides: of the mode.
      rng: rules when they are killed.
      number: the signal.
      twice: first make sure that two untouched runs end the same.
    """

    def __init__(
        self, folder: pathlib.Path, overrides: dict, rng: random.Random, number: signal.Signals, *, twice: bool = True
    ):
        self._folder, self._overrides, self._rng, self._signal = folder, overrides, rng, number
        self.counts: collections.Counter[str] = collections.Counter()
        for name in ("untouched", "again") if twice else ("untouched",):  # the first compiles
            started = time.monotonic()
            self._finish(folder / name)
            self._seconds = time.monotonic() - started
        self._expected = result(folder / "untouched")
        assert not twice or result(folder / "again") == self._expected

    def run(self, name: str, kills: int) -> None:
        """One run with so many kills; counts what happened.

        Raises:
          AssertionError: it did not go on, or ended otherwise than it should; the message says how.
        """
        workdir, stopped = self._folder / name, []
        for kill in range(kills):
            while_saving = self.counts["kills"] % 3 == 0  # one of three
            process, log = self._start(workdir)
            self._wait(process, workdir, while_saving)
            saving = any(workdir.glob("checkpoints/*tmp*"))
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process.pid, self._signal)
            process.join(PATIENCE)
            said = log.read_text()
            assert process.exitcode is not None, f"{name}: still there {PATIENCE} seconds after kill {kill}\n{said}"
            self._note_resumption(name, said, stopped)
            stopped = re.findall(r"stopped by SIGTERM (?:after|while evaluating) step ([\d,]*\d)", said)
            if process.exitcode == 0:
                self.counts["had ended before"] += 1
                self._finish(workdir)  # evaluated again, which must change nothing
                break
            status = -self._signal if self._signal == signal.SIGKILL else 128 + self._signal
            assert process.exitcode in (status, -self._signal), f"{name}: status {process.exitcode}\n{said}"
            self.counts["kills"] += 1
            self.counts["while a checkpoint was written"] += saving
        else:
            self._note_resumption(name, self._finish(workdir), stopped)
        ended = result(workdir)
        other = [
            f"{name} {item!r}: {ended[name].get(item)!r}, not {expected.get(item)!r}"
            for name, expected in self._expected.items()
            for item in expected.keys() | ended[name].keys()
            if ended[name].get(item) != expected.get(item)
        ]
        assert not other, "\n".join([f"{workdir} ended otherwise:", *(line[:500] for line in other)])
        self.counts["runs"] += 1

    def _start(self, workdir: pathlib.Path):
        log = self._folder / f"{workdir.name}.log"
        process = PROCESSES.Process(target=start, args=(workdir, log, self._overrides))
        process.start()
        return process, log

    def _note_resumption(self, name: str, said: str, stopped: list[str]) -> None:
        resumed = re.findall(r"resuming from step ([\d,]*\d)", said)
        self.counts["resumed from a checkpoint"] += len(resumed)
        assert not stopped or resumed == stopped, f"{name}: stopped after {stopped}, resumed from {resumed}\n{said}"

    def _finish(self, workdir: pathlib.Path) -> str:
        process, log = self._start(workdir)
        process.join(PATIENCE)
        assert process.exitcode == 0, f"{workdir.name}: status {process.exitcode}\n{log.read_text()}"
        return log.read_text()

    def _wait(self, process, workdir: pathlib.Path, while_saving: bool) -> None:
        if not while_saving:
            process.join(self._rng.uniform(0, self._seconds))
            return
        skipped = self._rng.randrange(4)  # not always the first one
        known: set[str] = set()
        while process.is_alive() and len(known) <= skipped:
            known |= {path.name for path in workdir.glob("checkpoints/*tmp*")}
        time.sleep(self._rng.uniform(0, 0.02))


def result(workdir: pathlib.Path) -> dict:
    """All that a run comes to: its last state to the bit, its metrics without times, its translations."""
    step = saved_steps(workdir / "checkpoints")[-1]
    leaves = jax.tree_util.tree_leaves_with_path(final_state(workdir, step))
    return {
        "state": {jax.tree_util.keystr(path): leaf.tobytes() for path, leaf in leaves},
        "metrics": dict(enumerate(timeless(read_json_lines(workdir / "metrics.jsonl")))),
        "translations": {file.name: file.read_text() for file in sorted((workdir / "translations").iterdir())},
    }


def campaign(
    folder: pathlib.Path, kills: int, *, number: signal.Signals, seed: int, modes=MODES, twice: bool = True
) -> dict[str, dict]:
    """Counts by mode, of `kills` in all; a progress bar where somebody watches."""
    (folder / "text").mkdir()
    text = write_text(folder / "text")
    places = {"data__path": str(text), "data__cache_dir": str(folder / "cache")}
    console = rich.console.Console(stderr=True)
    counts = {}
    with rich.progress.Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("kills", total=kills)
        for index, (mode, overrides) in enumerate(modes.items()):
            place = folder / re.sub(r"\W+", "_", mode)
            place.mkdir()
            one = Campaign(place, places | overrides, random.Random(f"{seed} {mode}"), number, twice=twice)
            wanted = (index + 1) * kills // len(modes) - index * kills // len(modes)
            run = 0
            while one.counts["kills"] < wanted:
                one.run(f"run{run}", min(KILLS_A_RUN, wanted - one.counts["kills"]))
                progress.update(task, completed=sum(c["kills"] for c in counts.values()) + one.counts["kills"])
                run += 1
            counts[mode] = dict(one.counts)
    return counts


def main() -> None:
    logging.getLogger("absl").setLevel(logging.WARNING)  # of Orbax
    number = signal.Signals[f"SIG{SIGNAL.value}"]
    modes = {name: MODES[name] for name in MODE.value}
    with contextlib.ExitStack() as stack:
        folder = FOLDER.value or stack.enter_context(tempfile.TemporaryDirectory())
        pathlib.Path(folder).mkdir(exist_ok=True)
        counts = campaign(pathlib.Path(folder), KILLS.value, number=number, seed=SEED.value, modes=modes)
    columns = ["kills", "while a checkpoint was written", "resumed from a checkpoint", "runs"]
    table = rich.table.Table("mode", *columns, title=f"{number.name}: all runs ended as if nobody had touched them")
    for mode, count in counts.items():
        table.add_row(mode, *(str(count.get(column, 0)) for column in columns))
    table.add_row("all", *(str(sum(count.get(column, 0) for count in counts.values())) for column in columns))
    rich.console.Console().print(table)
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(counts, indent=2) + "\n")


if __name__ == "__main__":  # not in the processes that it starts, which import this file once more
    KILLS = flags.DEFINE_integer("kills", 200, "total number of kills")
    SIGNAL = flags.DEFINE_enum("signal", "KILL", ["KILL", "TERM"], "signal to send")
    SEED = flags.DEFINE_integer("seed", 0, "seed of the instants at which runs are killed")
    MODE = flags.DEFINE_multi_enum("mode", list(MODES), list(MODES), "mode of training to test; may be repeated")
    FOLDER = flags.DEFINE_string("folder", None, "where the runs lie, and stay; default: a temporary place")
    JSON = flags.DEFINE_string("json", None, "write the counts to this file")
    cli.run(main)

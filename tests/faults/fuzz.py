"""Reads a great many damaged files: python -m tests.faults.fuzz --inputs=1000000.

Each target of `targets.py` gets its share of the inputs, in a process of its own. What a reader may do is to read, or
to refuse with a UserError. The first input that does something else, takes too long or takes too much memory ends it
all: it is saved, to be read again with --replay=FILE, and the exit status is 1. The same seed gives the same inputs.
Counts by target and outcome come as a table and as JSON.
"""

import collections
import contextlib
import json
import logging
import multiprocessing
import pathlib
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from absl import flags

from tests.faults.targets import CHEAP, TARGETS
from transformer_flax import cli
from transformer_flax.console import Progress

INPUTS = flags.DEFINE_integer("inputs", 100_000, "so many in all", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "of the inputs")
ONLY = flags.DEFINE_list("targets", [], f"some of {', '.join(TARGETS)}; default: all")
SECONDS = flags.DEFINE_float("seconds", 10, "the longest that an input may take")
MEGABYTES = flags.DEFINE_integer("megabytes", 512, "by which the memory in use may grow")
OUT = flags.DEFINE_string("out", "runs/faults", "where an input that fails is saved")
REPLAY = flags.DEFINE_string("replay", None, "read this input again and no other; its name begins with its target's")

CHECKPOINTS = 500  # inputs at most, each of which takes as long as a hundred others
SHARES = {
    "config": 3,
    "tokenizer": 4,
    "metrics": 6,
    "text": 6,
    "cache": 1,
    "results": 15,
    "variants": 15,
}  # about as long for each
PATIENCE = 120  # seconds for a process to start


class Result(NamedTuple):
    """What became of the inputs of a target."""

    counts: dict[str, int]  # by outcome
    seconds: float
    last: int  # the number of the input that was read last
    failure: str | None


def work(name: str, folder: str, seed: int, inputs: int, megabytes: int, now: Any, out: Connection) -> None:
    """A process that reads the inputs of one target.

    Args:
      name: of the target.
      folder: for its files, and for `input`, what it reads at the moment.
      seed: of the inputs.
      inputs: so many.
      megabytes: by which its memory may grow.
      now: is told the number of the input.
      out: is told that it has started, and at the end the counts and what failed.
    """
    target = _start(name, folder)
    counts: collections.Counter[str] = collections.Counter()
    if name in CHEAP:  # the threads of the others reserve address space by the gigabyte
        limit = _virtual_memory() + 4 * megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = _peak()
    out.send(None)
    for number in range(inputs):
        now.value = number
        given = target.make(random.Random(f"{seed}/{name}/{number}"))
        pathlib.Path(folder, "input").write_bytes(given)
        failure = None
        try:
            counts[target(given)] += 1
        except BaseException:  # panics of libraries in Rust are no Exception
            failure = traceback.format_exc()
        if _peak() - before > megabytes:
            failure = f"it took {_peak() - before:,} MB"
        if failure:
            out.send((counts, failure))
            return
    out.send((counts, None))


def _start(name: str, folder: str):
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    (place := pathlib.Path(folder, "files")).mkdir()
    with contextlib.redirect_stdout(sys.stderr):  # what a run tells while it is trained is no result
        return TARGETS[name](place)


def _peak() -> int:
    """Of the memory of this process, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _virtual_memory() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def fuzz(name: str, folder: str, inputs: int, progress: Progress) -> Result:
    """Has a target read its inputs, and watches it."""
    context = multiprocessing.get_context("spawn")
    now = context.Value("q", 0)
    receiver, sender = context.Pipe(duplex=False)
    arguments = (name, folder, SEED.value, inputs, MEGABYTES.value, now, sender)
    process = context.Process(target=work, args=arguments, daemon=True)
    process.start()
    sender.close()
    started = since = time.monotonic()
    last = 0

    def result(counts: dict[str, int], failure: str | None) -> Result:
        return Result(counts, time.monotonic() - started, now.value, failure)

    try:
        if not receiver.poll(PATIENCE):
            raise TimeoutError(f"the process of {name} does not start")
        receiver.recv()
        started = since = time.monotonic()
        with progress.bar(name) as update:
            while not receiver.poll(0.2):
                update(now.value, inputs)
                if now.value != last:
                    last, since = now.value, time.monotonic()
                elif time.monotonic() - since > SECONDS.value:
                    return result({}, f"it took more than {SECONDS.value:g} seconds")
        return result(*receiver.recv())
    except EOFError:
        process.join()
        return result({}, f"the process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def shares(inputs: int, chosen: list[str]) -> dict[str, int]:
    """How many inputs each target gets."""
    given = dict.fromkeys(chosen, 0)
    if "checkpoint" in given:
        given["checkpoint"] = min(CHECKPOINTS, inputs if len(given) == 1 else max(1, inputs // 1000))
    left = inputs - sum(given.values())
    parts = sum(SHARES.get(name, 0) for name in given)
    return {name: left * SHARES[name] // parts if name in SHARES else count for name, count in given.items()}


def replay(file: pathlib.Path) -> None:
    """Reads one input; a defect shows its traceback."""
    name = file.name.partition(".")[0]
    with tempfile.TemporaryDirectory() as folder:
        print(f"{file}: {_start(name, folder)(file.read_bytes())}")


def main() -> None:
    if unknown := set(ONLY.value) - TARGETS.keys():
        sys.exit(f"--targets: there is no {min(unknown)}; there are {', '.join(TARGETS)}")
    if REPLAY.value is not None:
        return replay(pathlib.Path(REPLAY.value))
    results: dict[str, Result] = {}
    failed = None
    with Progress(stderr=True) as progress:
        for name, inputs in shares(INPUTS.value, ONLY.value or list(TARGETS)).items():
            # In memory where there is such a place: what is measured is the readers and not the disk.
            with tempfile.TemporaryDirectory(dir="/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None) as folder:
                results[name] = result = fuzz(name, folder, inputs, progress)
                if result.failure:
                    failed = pathlib.Path(OUT.value, f"{name}.{SEED.value}.{result.last}")
                    failed.parent.mkdir(parents=True, exist_ok=True)
                    failed.write_bytes(pathlib.Path(folder, "input").read_bytes())
                    progress.say(f"{name}: {result.failure}\nsaved: --replay={failed}")
                    break
    rows = [
        [name, outcome, f"{count:,}", f"{result.seconds:,.1f}"]
        for name, result in results.items()
        for outcome, count in sorted(result.counts.items())
    ]
    progress.table("inputs", ["target", "outcome", "inputs", "seconds in all"], rows)
    json.dump({name: result._asdict() for name, result in results.items()}, sys.stdout, indent=2)
    print()
    if failed:
        sys.exit(1)
    return None


if __name__ == "__main__":
    cli.run(main)

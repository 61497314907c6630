"""Times functions side by side, so that a noisy machine is noisy to all of them."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import rich.console
import rich.progress


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    median: float
    low: float
    high: float
    first: float  # the first call, which compiles
    result: Any  # of the first call

    def per_second(self, count: int) -> str:
        """So many of a thing done in a call, as `median (from worst to best)` a second."""
        return f"{count / self.median:,.1f} ({count / self.high:,.1f} to {count / self.low:,.1f})"


def interleaved(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Timing]:
    """Calls each function once to compile it, then all of them in turn, `repeats` times; waits for what they return."""

    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("timing", total=len(functions) * (repeats + 1))

        def timed(function) -> tuple[float, Any]:
            started = time.perf_counter()
            result = jax.block_until_ready(function())
            seconds = time.perf_counter() - started
            progress.advance(task)
            return seconds, result

        first = {name: timed(function) for name, function in functions.items()}
        rounds = [{name: timed(function)[0] for name, function in functions.items()} for _ in range(repeats)]
    timings = {}
    for name in functions:
        seconds = [each[name] for each in rounds]
        timings[name] = Timing(statistics.median(seconds), min(seconds), max(seconds), *first[name])
    return timings

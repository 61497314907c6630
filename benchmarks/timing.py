"""Times functions in turn, so that a machine's noise affects all of them."""

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
    """Timed calls of one function."""

    seconds: tuple[float, ...]  # of each round
    first: float  # seconds of the first call, which compiles

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        return min(self.seconds)

    @property
    def high(self) -> float:
        return max(self.seconds)

    def per_second(self, count: int) -> str:
        """Formats the rate of `count` things in a call: `median (worst to best)` a second."""
        return f"{count / self.median:,.1f} ({count / self.high:,.1f} to {count / self.low:,.1f})"

    def times_as_fast_as(self, other: "Timing") -> tuple[float, float, float]:
        """Returns (median, least, greatest) of each round's ratio, which slow hours of the machine do not affect."""
        ratios = [theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def interleaved(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Timing]:
    """Calls each function once to compile it, then all in turn `repeats` times; waits for their results."""

    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("timing", total=len(functions) * (repeats + 1))

        def timed(function) -> float:
            started = time.perf_counter()
            jax.block_until_ready(function())
            seconds = time.perf_counter() - started
            progress.advance(task)
            return seconds

        first = {name: timed(function) for name, function in functions.items()}
        rounds = [{name: timed(function) for name, function in functions.items()} for _ in range(repeats)]
    return {name: Timing(tuple(each[name] for each in rounds), first[name]) for name in functions}

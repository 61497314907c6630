"""Numbers on their way to the user: sums on the host, `metrics.jsonl`, TensorBoard."""

import json
import pathlib
import time

import numpy as np
import tensorboardX

from transformer_flax.errors import UserError
from transformer_flax.training.loss import perplexity


class Meter:
    """Adds up sums and counts, divides once, and keeps the rate of training alone."""

    def __init__(self):
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._seconds, self._timed_steps, self._timed_tokens = 0.0, 0, 0

    def add(self, sums, counts) -> None:
        """Adds one step's sums and counts, as they come from the device."""
        for total, values in ((self._sums, sums), (self._counts, counts)):
            for name, value in values.items():
                total[name] = total.get(name, 0.0) + float(value)

    def add_time(self, seconds: float, tokens: int) -> None:
        """Adds a step's time and its real tokens, source and target; steps that compiled are left out."""
        self._seconds += seconds
        self._timed_steps += 1
        self._timed_tokens += tokens

    def means(self) -> dict[str, float]:
        """The mean of everything added, with the perplexity in place of the unsmoothed loss."""
        means = {name: total / self._counts[name] for name, total in self._sums.items() if name != "nll"}
        if "nll" in self._sums:
            means["perplexity"] = perplexity(self._sums["nll"], self._counts["nll"])
        return means

    def rates(self) -> dict[str, float]:
        """Steps and tokens per second, of the steps that were timed."""
        if not self._seconds:
            return {}
        return {
            "steps_per_second": self._timed_steps / self._seconds,
            "tokens_per_second": self._timed_tokens / self._seconds,
        }


class MetricsWriter:
    """Writes scalars to `metrics.jsonl`, one object a line, and to TensorBoard events beside it.

    Args:
      file: the JSON lines; on resuming, what was written after `step` is cut off, and time goes on from there.
      step: the step that training starts from.
    """

    def __init__(self, file: pathlib.Path, step: int):
        kept = [line for line in read_metrics(file) if line["step"] <= step] if file.exists() else []
        self._lines = file.open("a+", encoding="utf-8")
        self._lines.seek(0)
        for _ in kept:  # steps only grow, so what is kept stands first
            self._lines.readline()
        self._lines.truncate(self._lines.tell())
        self._events = tensorboardX.SummaryWriter(str(file.parent), purge_step=step + 1)
        self._started = time.monotonic() - (kept[-1]["seconds"] if kept else 0.0)

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, earlier sessions included."""
        return time.monotonic() - self._started

    def write(self, step: int, prefix: str, values: dict[str, float]) -> None:
        """Writes {prefix/name: value} at a step, with the seconds so far."""
        named = {f"{prefix}/{name}": float(value) for name, value in values.items()}
        self._lines.write(json.dumps({"step": step, "seconds": round(self.seconds, 2), **named}) + "\n")
        self._lines.flush()
        for name, value in named.items():
            self._events.add_scalar(name, np.float64(value), step)
        self._events.flush()

    def close(self) -> None:
        self._lines.close()
        self._events.close()


def read_metrics(file: pathlib.Path) -> list[dict[str, float]]:
    """The lines of a `metrics.jsonl`; a last line that was cut short by a kill is left out."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is damaged: {error}; mend the line or move the file away") from error

"""Sums metrics on the host and writes them to `metrics.jsonl` and TensorBoard."""

import collections
import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from transformer_flax.errors import UserError
from transformer_flax.files import JsonLines, read_json_lines
from transformer_flax.training.loss import perplexity
from transformer_flax.training.multihost import is_first

# tensorboardX imports PyTorch if it is installed, which costs 2 seconds and 600 MB. A module that is None is not found.
pytorch = sys.modules.setdefault("torch", None)  # pyrefly: ignore (its type leaves None out)
try:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore (made when it is imported)
    from tensorboardX.proto.summary_pb2 import Summary  # pyrefly: ignore (the same)
finally:
    if pytorch is None:
        del sys.modules["torch"]


class Meter:
    """Running sums and counts, divided once, and the speed of the training steps alone. May continue from `totals`."""

    def __init__(self, totals: dict[str, dict[str, float]] | None = None):
        totals = totals or {"sums": {}, "counts": {}}
        self._sums, self._counts = collections.Counter(totals["sums"]), collections.Counter(totals["counts"])
        self._timed: collections.Counter[str] = collections.Counter()

    def add(self, sums, counts) -> None:
        """Adds the sums and counts of one step, as returned by the device."""
        for total, values in ((self._sums, sums), (self._counts, counts)):
            total.update({name: float(value) for name, value in values.items()})

    def add_time(self, seconds: float, tokens: int, flops: int) -> None:
        """Adds a step's time, its source and target tokens without padding, and its FLOPs.

        The caller leaves out steps that compiled a program.
        """
        self._timed.update({"seconds": seconds, "steps": 1, "tokens": tokens, "flops": flops})

    @property
    def totals(self) -> dict[str, dict[str, float]]:
        """The sums and counts so far, by name."""
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    @property
    def log_perplexity(self) -> float:
        """The unsmoothed loss in nats per token."""
        return self._sums["nll"] / self._counts["nll"]

    def means(self) -> dict[str, float]:
        """Returns the mean of each metric, with the perplexity in place of the unsmoothed loss."""
        means = {name: total / self._counts[name] for name, total in self._sums.items() if name != "nll"}
        if "nll" in self._sums:
            means["perplexity"] = perplexity(self._sums["nll"], self._counts["nll"])
        return means

    def rates(self) -> dict[str, float]:
        """Returns the steps, tokens and FLOPs per second of the timed steps."""
        if not (seconds := self._timed["seconds"]):
            return {}
        return {f"{name}_per_second": self._timed[name] / seconds for name in ("steps", "tokens", "flops")}


class StepLines:
    """A file of JSON lines, each with its step. Only the first process writes. Lines after `step` are removed."""

    def __init__(self, file: pathlib.Path, step: int):
        lines = read_json_lines(file)
        self.kept = [line for line in lines if line["step"] <= step]
        self.dropped = [line for line in lines if line["step"] > step]
        self._lines = JsonLines(file, self.kept) if is_first() else None

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line."""
        if self._lines:
            self._lines.write(line)

    def close(self) -> None:
        if self._lines:
            self._lines.close()


class MetricsWriter:
    """A writer of scalars to `metrics.jsonl` and to TensorBoard events beside it.

    Training starts from `step`, which the run had reached after `seconds`. The run's time resumes from there, or from
    the last line that is kept (see `StepLines`) if that is later. `score` is the name of the validation score. `send`
    is called with each line, too.
    """

    def __init__(
        self,
        file: pathlib.Path,
        step: int,
        *,
        score: str,
        seconds: float = 0.0,
        send: Callable[[dict[str, Any]], None] = lambda line: None,
    ):
        self._send = send
        self._lines = StepLines(file, step)
        self.written, self.dropped = self._lines.kept, self._lines.dropped
        self._score = f"valid/{score}"
        self._started = time.monotonic() - max([seconds, *(line.get("seconds", 0.0) for line in self.written[-1:])])
        self._events = None
        if not is_first():
            return
        # Not tensorboardX's own writer: its thread dies when the disk is full, and its callers then wait forever.
        self._events = EventsWriter(str(file.parent / "events"), f".{os.getpid()}.{step}")
        restart = Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self._events.write_event(restart)  # makes TensorBoard drop old events after `step`

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, earlier sessions included."""
        return time.monotonic() - self._started

    def has(self, step: int, split: str, *, final: bool = False) -> bool:
        """Returns whether the evaluation of a split at this step is written; `final`: the final evaluation."""
        return any(line["step"] == step and (f"{split}/final" in line) == final for line in self._evaluations(split))

    def scores(self) -> dict[int, float]:
        """Returns the validation scores, by step, of the evaluations during training that averaged no checkpoints."""
        lines = [line for line in self._evaluations("valid") if "valid/final" not in line]
        return {
            line["step"]: line[self._score]
            for line in lines
            if line.get("valid/averaged") == 1 and self._score in line  # an older version may have had another score
        }

    def _evaluations(self, split: str) -> list[dict[str, Any]]:
        return [line for line in self.written if f"{split}/loss" in line]

    def write(self, step: int, prefix: str, values: dict[str, Any]) -> None:
        """Writes {prefix/name: value} at a step, as floats, with the seconds so far."""
        named = {f"{prefix}/{name}": float(value) for name, value in values.items()}
        line = {"step": step, "seconds": round(self.seconds, 2), **named}
        self._send(line)
        self._lines.write(line)
        self.written.append(line)
        if self._events is None:
            return
        try:
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in named.items()]
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
            self._events.flush()
        except OSError as error:
            raise UserError(
                f"TensorBoard events cannot be written: {error.strerror}; fix this and run the same command"
            ) from error

    def close(self) -> None:
        self._lines.close()
        if self._events is not None:
            with contextlib.suppress(OSError):  # `write` has flushed every line, and has reported a failure
                self._events.close()

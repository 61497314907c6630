"""Sums metrics on the host and writes them to `metrics.jsonl` and TensorBoard."""

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore (made when it is imported)
from tensorboardX.proto.summary_pb2 import Summary  # pyrefly: ignore (the same)

from transformer_flax.errors import UserError
from transformer_flax.files import JsonLines, read_json_lines
from transformer_flax.training.loss import perplexity
from transformer_flax.training.multihost import is_first


class Meter:
    """Running sums and counts, divided once, and the speed of the training steps alone. May continue from `totals`."""

    def __init__(self, totals: dict[str, dict[str, float]] | None = None):
        totals = totals or {"sums": {}, "counts": {}}
        self._sums, self._counts = dict(totals["sums"]), dict(totals["counts"])
        self._seconds, self._timed_steps, self._timed_tokens, self._timed_flops = 0.0, 0, 0, 0

    def add(self, sums, counts) -> None:
        """Adds the sums and counts of one step, as returned by the device."""
        for total, values in ((self._sums, sums), (self._counts, counts)):
            for name, value in values.items():
                total[name] = total.get(name, 0.0) + float(value)

    def add_time(self, seconds: float, tokens: int, flops: int) -> None:
        """Adds a step's time, its source and target tokens without padding, and its FLOPs.

        The caller leaves out steps that compiled a program.
        """
        self._seconds += seconds
        self._timed_steps += 1
        self._timed_tokens += tokens
        self._timed_flops += flops

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
        if not self._seconds:
            return {}
        return {
            "steps_per_second": self._timed_steps / self._seconds,
            "tokens_per_second": self._timed_tokens / self._seconds,
            "flops_per_second": self._timed_flops / self._seconds,
        }


class StepLines:
    """A file of JSON lines, each with its step. Only the first process writes. Lines after `step` are removed."""

    def __init__(self, file: pathlib.Path, step: int):
        lines = read_json_lines(file) if file.exists() else []
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

    Training starts from `step`. The run's time resumes from the last line that is kept; see `StepLines`. `score` is the
    name of the validation score. `send` is called with each line, too.
    """

    def __init__(
        self,
        file: pathlib.Path,
        step: int,
        *,
        score: str,
        send: Callable[[dict[str, Any]], None] = lambda line: None,
    ):
        self._send = send
        self._lines = StepLines(file, step)
        kept, self.dropped = self._lines.kept, self._lines.dropped
        self._written: set[tuple[int, str, bool]] = set()
        self.validation_losses: dict[int, float] = {}  # by step, of evaluations during training
        self.scores: dict[int, float] = {}  # by step, of those evaluations that averaged no checkpoints
        self._score = f"valid/{score}"
        for line in kept:
            self._note(line["step"], line)
        self._started = time.monotonic() - (kept[-1].get("seconds", 0.0) if kept else 0.0)
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

    def has(self, step: int, prefix: str, *, final: bool = False) -> bool:
        """Returns whether values of this step and prefix are written. `final`: whether they include prefix/final."""
        return (step, prefix, final) in self._written

    def write(self, step: int, prefix: str, values: dict[str, float]) -> None:
        """Writes {prefix/name: value} at a step, with the seconds so far."""
        named = {f"{prefix}/{name}": float(value) for name, value in values.items()}
        line = {"step": step, "seconds": round(self.seconds, 2), **named}
        self._send(line)
        self._lines.write(line)
        self._note(step, named)
        if self._events is None:
            return
        try:
            for name, value in named.items():
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            self._events.flush()
        except OSError as error:
            raise UserError(
                f"TensorBoard events cannot be written: {error.strerror}; fix this and run the same command"
            ) from error

    def _note(self, step: int, values: dict[str, float]) -> None:
        for prefix in {name.partition("/")[0] for name in values if "/" in name}:
            self._written.add((step, prefix, f"{prefix}/final" in values))
        if "valid/loss" in values and "valid/final" not in values:
            self.validation_losses[step] = values["valid/loss"]
            if values.get("valid/averaged") == 1:
                self.scores[step] = values[self._score]

    def close(self) -> None:
        self._lines.close()
        if self._events is not None:
            self._events.close()

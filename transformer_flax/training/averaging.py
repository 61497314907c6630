"""Chooses the parameters of a run: one checkpoint's, the mean of several checkpoints, or the moving average."""

import logging
import numbers
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.errors import UserError
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.optimizer import keeps_average

EMA = "ema"
logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A choice of parameters. `str(choice)` describes the choice to the user."""

    steps: list[int]  # the steps of the checkpoints to average
    kind: str = "params"  # what to read from each checkpoint: "params", or EMA
    missing: Sequence[int] = ()  # the steps to average that have no checkpoint

    def __str__(self) -> str:
        listed, average = ", ".join(f"{step:,}" for step in self.steps), self.kind == EMA
        if len(self.steps) == 1:
            return f"{'the moving average at' if average else 'the parameters of'} step {listed}"
        return f"the mean of the {'moving averages' if average else 'parameters'} at steps {listed}"

    def warning(self, workdir: pathlib.Path, count: int) -> str:
        """Returns a warning if fewer than `count` checkpoints of a run are averaged, else ""."""
        if self.missing:
            listed = ", ".join(f"{step:,}" for step in self.missing)
            of = f"{len(self.steps)} in place of {len(self.steps) + len(self.missing)}"
            return f"{workdir} has no checkpoint of step {listed}, so the average is of {of}"
        if len(self.steps) < count:
            advice = "; an average of 1, the newest alone, may be better" if len(self.steps) > 1 else ""
            early = f"too early for a mean of {count} checkpoints: this is {self}{advice}"
            return f"{workdir} is at step {self.steps[-1]:,}, {early}"
        return ""


def choose(
    directory: pathlib.Path,
    config: ConfigDict,
    *,
    average: int | str | None = None,
    steps: int | Sequence[int] | None = None,
) -> Choice:
    """Chooses the parameters to use from the checkpoints in a directory.

    `average` is EMA, or the number of checkpoints to average, which `to_average` chooses. Its default is what the run's
    final evaluation uses. `steps` names the checkpoints to average instead. The moving average is read from them if
    `average` is EMA, or if it is None and the run keeps one.

    Raises:
      UserError: there is no checkpoint, a named step has none, `average` is no number and not EMA, or is above 1 beside
        `steps`, or no moving average was kept.
    """
    saved = saved_steps(directory)
    if not saved:
        raise UserError(
            f"{directory.parent} holds no checkpoint yet; a run writes one every {config.checkpoint.every:,} steps"
        )
    if steps is not None and average not in (None, EMA, 1):
        raise UserError(
            f"average is {average!r} and the steps of checkpoints are named, which are averaged: leave average out, or "
            f"set it to 1 for their parameters, or to {EMA!r} for their moving averages"
        )
    if average is None:
        average = EMA if keeps_average(config) else config.eval.final_average
    if average == EMA and not keeps_average(config):
        raise UserError(f"{directory.parent} has kept no moving average: its config.ema_decay is 0")
    if average != EMA and not (isinstance(average, numbers.Integral) and int(average) >= 1):
        raise UserError(f"average is {average!r}; it must be a number of checkpoints, at least 1, or {EMA!r}")
    kind = EMA if average == EMA else "params"
    if steps is not None:
        named = np.ravel(steps).tolist()
        missing = [step for step in named if step not in saved]
        if missing or not named:
            there = ", ".join(map(str, saved))
            raise UserError(f"{directory.parent} has no checkpoints of steps {missing}; it has those of {there}")
        return Choice([step for step in saved if step in named], kind)
    if average == EMA:
        return Choice(saved[-1:], kind)
    average = int(average)
    choice = to_average(saved, saved[-1], config.checkpoint.every, average)
    if warning := choice.warning(directory.parent, average):
        logger.warning("%s", warning)
    return choice


def to_average(steps: Sequence[int], newest: int, every: int, count: int) -> Choice:
    """Chooses the newest step and the `count` - 1 steps before it at the interval, where checkpoints exist.

    An older checkpoint does not replace a missing one. The older checkpoint, such as the best one, may be many steps
    away, and the mean is better without it. At the beginning of a run, fewer than `count` are chosen.

    `steps` are those of the existing checkpoints, and `every` is the interval in steps. `newest`, the step to evaluate,
    need not be at the interval, and its checkpoint need not exist yet.
    """
    before = range((newest - 1) // every * every, 0, -every)[: count - 1][::-1]
    missing = [step for step in before if step not in steps]
    return Choice([*(step for step in before if step in steps), newest], missing=missing)


def mean(trees: Iterable[Any]) -> Any:
    """Returns the mean of trees of parameters, in float32, on the host. Reads one tree at a time."""
    total, count = None, 0
    for tree in trees:
        tree = jax.tree.map(np.float32, jax.device_get(tree))
        total, count = tree if total is None else jax.tree.map(np.add, total, tree), count + 1
    return jax.tree.map(lambda leaf: leaf / np.float32(count), total)

"""Finds the step to resume from: the newest of which all runs that are trained together have a checkpoint.

`run_directory` decides whether a config may resume a run.
"""

from collections.abc import Sequence
from typing import Any

from transformer_flax.console import Progress
from transformer_flax.errors import UserError
from transformer_flax.training.checkpoint_files import UnreadableError
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.multihost import share
from transformer_flax.training.step import TrainState


def resume(
    runs: Sequence[Checkpoints],
    like: TrainState,
    progress: Progress,
    labels: Sequence[str] = ("",),
    first: int = 0,
) -> tuple[list[tuple[TrainState, Any]], int]:
    """Reads the newest checkpoints that can be read; damaged and later ones are put aside.

    Args:
      runs: the checkpoints of each run; mostly of one.
      like: a tree of a state's shapes.
      progress: to say what was found.
      labels: of the runs, before what is said.
      first: the step at which several runs save for the first time.

    Returns:
      The state of each run, with the totals saved beside it, and the step; [] and 0 where the runs begin.

    Raises:
      UserError: no checkpoint can be read, or a run is further than the others.
    """
    for checkpoints in runs:
        checkpoints.require_room(like, len(runs))
    unreadable: list[tuple[int, UnreadableError]] = []
    for step in _common_steps(runs, first):
        restored = []
        for i, checkpoints in enumerate(runs):
            try:
                restored.append(checkpoints.restore(like, step))
            except UnreadableError as error:
                if share()[1] > 1:  # not all processes may find it so
                    raise
                unreadable.append((i, error))
        if len(restored) == len(runs):
            for i, error in unreadable:  # the disk and the device can read: another one was
                aside = runs[i].put_aside(error.step, "damaged")
                progress.say(f"{labels[i]}WARNING: {error}; it is put aside as {aside.name}")
            for label, checkpoints in zip(labels, runs, strict=True):
                progress.say(f"{label}resuming from step {step:,} in {checkpoints.run}")
            _put_aside_later(runs, step, progress, labels)
            return restored, step
    if unreadable:  # a disk or a device in trouble is likelier than as many damages
        _, newest = unreadable[0]
        raise UserError(
            f"{newest}; no checkpoint can be read, and nothing was changed: run the same command when the cause is "
            f"mended, or choose another --workdir. The cause: {newest.__cause__}"
        )
    _put_aside_later(runs, 0, progress, labels)
    return [], 0


def _common_steps(runs: Sequence[Checkpoints], first: int) -> list[int]:
    """The steps of which all runs have a checkpoint, from the newest.

    Raises:
      UserError: a run is further ahead than runs that are trained together ever are: it was trained by itself, and what
        it has learned since must not be lost.
    """
    steps = [checkpoints.steps() for checkpoints in runs]
    common = sorted(set.intersection(*map(set, steps)), reverse=True)
    newest = common[0] if common else 0
    ahead = [[step for step in each if step > newest] for each in steps]
    # Runs that are killed while they save lie one checkpoint apart, and before the first only where it is due.
    if any(len(each) > 1 or (not common and each and each[0] > first) for each in ahead):
        found = "; ".join(
            f"{checkpoints.run}: {', '.join(map(str, each)) or 'none'}"
            for checkpoints, each in zip(runs, steps, strict=True)
        )
        raise UserError(
            f"the seeds have no checkpoint of the same step to resume from together ({found}); train them one by one, "
            "with --config.seed and --workdir"
        )
    return common


def _put_aside_later(runs: Sequence[Checkpoints], step: int, progress: Progress, labels: Sequence[str]) -> None:
    for label, checkpoints in zip(labels, runs, strict=True):
        for later in checkpoints.steps():
            if later > step:  # written just before an end came to the others
                aside = checkpoints.put_aside(later, "ahead")
                progress.say(
                    f"{label}its checkpoint of step {later:,}, which others lack, is put aside as {aside.name}"
                )

"""Restores a run, or runs that are trained together, from the newest step for which all have a checkpoint.

The module `run_directory` decides whether a config may resume a run.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from transformer_flax.console import Progress
from transformer_flax.errors import UserError
from transformer_flax.training.checkpoint_files import UnreadableError
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.compiled import Programs
from transformer_flax.training.multihost import share
from transformer_flax.training.step import TrainState


def resume_or_begin(
    programs: Programs,
    runs: Mapping[str, Checkpoints],
    progress: Progress,
    *,
    first: int = 0,
    combine: Callable[[Sequence[TrainState]], Any] = lambda states: states[0],
) -> tuple[Any, list[Any], int]:
    """Restores the newest checkpoints that can be read, or begins anew. Puts damaged and later checkpoints aside.

    `runs` are the checkpoints of each run, usually of one run, by the prefix of the run's messages. Runs that are
    trained together save for the first time at the step `first`, and `combine` makes one state of the states of all.

    Returns the state to train from, on the devices; the totals saved with each run's state; and the step of the state.
    The restored states are freed when this function returns. Otherwise, a device would hold each state twice.
    """
    like = jax.eval_shape(lambda: programs.init(0))
    for checkpoints in runs.values():
        checkpoints.require_room(like, len(runs))
    unreadable: list[tuple[str, UnreadableError]] = []
    for step in common_steps({checkpoints.workdir: checkpoints.steps() for checkpoints in runs.values()}, first):
        restored: list[tuple[TrainState, Any]] = []
        for label, checkpoints in runs.items():
            try:
                restored.append(checkpoints.restore(like, step))
            except UnreadableError as error:
                if share()[1] > 1:  # another process may be able to read this checkpoint
                    raise
                unreadable.append((label, error))
        if len(restored) == len(runs):
            for label, error in unreadable:  # not a fault of the disk or device: another checkpoint was read
                aside = runs[label].put_aside(error.step, "damaged")
                progress.say(f"{label}WARNING: {error}; it is put aside as {aside.name}")
            for label, checkpoints in runs.items():
                progress.say(f"{label}resuming from step {step:,} in {checkpoints.workdir}")
            break
    else:
        if unreadable:  # a failing disk or device is likelier than damage to every checkpoint
            _, newest = unreadable[0]
            raise UserError(
                f"{newest}; no checkpoint can be read, and nothing was changed: fix the cause and run the same "
                f"command, or choose another --workdir. The cause: {newest.__cause__}"
            )
        step, restored = 0, [(programs.init(checkpoints.seed), None) for checkpoints in runs.values()]
    for label, checkpoints in runs.items():
        for later in [later for later in checkpoints.steps() if later > step]:  # written just before all were killed
            aside = checkpoints.put_aside(later, "ahead")
            progress.say(f"{label}its checkpoint of step {later:,}, which others lack, is put aside as {aside.name}")
    state = programs.parallel.place(combine([state for state, _ in restored]))
    return state, [totals for _, totals in restored], step


def common_steps(runs: Mapping[pathlib.Path, list[int]], first: int) -> list[int]:
    """Returns the steps for which all runs have a checkpoint, newest first. `runs` are the steps that each run has.

    Refuses a run that is further ahead than runs that are trained together can be. This run was trained alone, and its
    later checkpoints must not be lost.
    """
    common = sorted(set.intersection(*map(set, runs.values())), reverse=True)
    newest = common[0] if common else 0
    ahead = [[step for step in steps if step > newest] for steps in runs.values()]
    # Runs that are killed while they save differ by at most one checkpoint. If the runs have no checkpoint in common,
    # this one checkpoint is the first, at step `first` or before.
    if any(len(each) > 1 or (not common and each and each[0] > first) for each in ahead):
        found = "; ".join(f"{run}: {', '.join(map(str, steps)) or 'none'}" for run, steps in runs.items())
        raise UserError(
            f"the seeds have no checkpoint of the same step to resume from together ({found}); give --seeds those that "
            "have one, or train each alone ('--seeds=2,' names the seed 2)"
        )
    return common

"""Where runs go on from: the newest step of which all that are trained together have a checkpoint."""

import contextlib
from collections.abc import Sequence
from typing import Any

from transformer_flax.errors import UserError
from transformer_flax.training.averaging import UnreadableError
from transformer_flax.training.multihost import share
from transformer_flax.training.run_writer import Record
from transformer_flax.training.step import TrainState


def resume(records: Sequence[Record], like: TrainState, stack: contextlib.ExitStack) -> tuple[list[TrainState], int]:
    """The states to go on from and their step; none, and 0, where the runs begin.

    The files of all records are at that step afterwards, and what was written later is put aside or cut off.

    Args:
      records: opened; mostly of one run.
      like: a tree of a state's shapes.
      stack: that closes the files.

    Raises:
      UserError: checkpoints cannot be read, or a run has come further than the others.
    """
    for record in records:
        record.checkpoints.require_room(like, len(records))
    unreadable: list[tuple[Record, UnreadableError]] = []
    for step in _common_steps(records):
        restored = []
        for record in records:
            try:
                restored.append(record.checkpoints.restore(like, step))
            except UnreadableError as error:
                if share()[1] > 1:  # which may not all find it so
                    raise
                unreadable.append((record, error))
        if len(restored) < len(records):
            continue
        for record, error in unreadable:  # the disk and the device can read: another one was
            record.put_aside(error)
        for record, (_, totals) in zip(records, restored, strict=True):
            record.say(f"resuming from step {step:,} in {record.workdir.path}")
            _begin(record, stack, step, totals)
        return [state for state, _ in restored], step
    if unreadable:  # a disk or a device in trouble is likelier than as many damages
        _, newest = unreadable[0]
        raise UserError(
            f"{newest}; no checkpoint can be read, and nothing was changed: run the same command when the cause is "
            f"mended, or choose another --workdir. The cause: {newest.__cause__}"
        )
    for record in records:
        _begin(record, stack, 0)
    return [], 0


def _common_steps(records: Sequence[Record]) -> list[int]:
    """The steps of which all runs have a checkpoint, from the newest.

    Raises:
      UserError: a run is further ahead of the others than those that are trained together ever are: it was trained
        otherwise, and what it has learned since is not thrown away.
    """
    steps = [record.checkpoints.steps() for record in records]
    common = sorted(set.intersection(*map(set, steps)), reverse=True)
    newest = common[0] if common else 0
    ahead = [[step for step in each if step > newest] for each in steps]
    config = records[0].config
    first = min(every for every in (config.checkpoint.every, config.eval.every) if every)  # that is saved of a run
    begun = range(1, min(first, config.steps - 1) + 1)  # steps at which one can have saved, and the others not yet
    if any(len(each) > 1 or (not common and each and each[0] not in begun) for each in ahead):
        found = "; ".join(
            f"{record.workdir.path}: {', '.join(map(str, each)) or 'none'}"
            for record, each in zip(records, steps, strict=True)
        )
        raise UserError(
            f"the seeds have no checkpoint of the same step to go on from together ({found}); train them one by one, "
            "with --config.seed and --workdir"
        )
    return common


def prune(records: Sequence[Record]) -> None:
    """Deletes old checkpoints of all records, up to the newest that all have, from which they would resume together."""
    newest = max(set.intersection(*(set(record.checkpoints.steps()) for record in records)), default=0)
    for record in records:
        record.checkpoints.prune(newest)


def _begin(record: Record, stack: contextlib.ExitStack, step: int, totals: Any = None) -> None:
    for later in record.checkpoints.steps():
        if later > step:  # written just before an end came to the others
            aside = record.checkpoints.put_aside(later, "ahead")
            record.say(f"its checkpoint of step {later:,}, which others have not, is put aside as {aside.name}")
    record.begin(stack, step, totals)

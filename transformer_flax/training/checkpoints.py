"""Checkpoints: written in the background, kept by rule, restored, averaged."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from transformer_flax.errors import UserError
from transformer_flax.training.step import TrainState

_training: Any = ocp.training  # its policies do not have the types that its checkpointer asks for


def saved_steps(directory: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a directory, ascending; those that were never completed have other names."""
    return sorted(int(folder.name) for folder in directory.glob("*") if folder.name.isdecimal())


def to_average(steps: Sequence[int], every: int, count: int) -> list[int]:
    """Of the steps [ascending] of checkpoints, those whose parameters are averaged for an average of `count`.

    They are the last regular ones, those at the interval: one made for an evaluation or at the end may lie in between.
    Where nothing is to be averaged, or none is regular, it is the newest of all.
    """
    return (_regular(steps, every)[-count:] if count > 1 else []) or list(steps[-1:])


def _regular(steps: Iterable[int], every: int) -> list[int]:
    return [step for step in steps if step % every == 0]


def load_params(directory: pathlib.Path, step: int, like: Any, *, kind: str = "params") -> Any:
    """The parameters of one checkpoint and nothing else of it, on the first device.

    Args:
      directory: where the checkpoints lie; it may be in use by a run that trains.
      step: one of `saved_steps`.
      like: a tree of their shapes.
      kind: "params", or "ema" for their moving average.

    Raises:
      UserError: the checkpoint cannot be read.
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            loaded: Any = ocp.load_checkpointables(
                str(directory.resolve() / str(step)), {"state": {kind: _on_first_device(like)}}
            )
    except Exception as error:  # of whatever kind the storage has for it
        if isinstance(error.__cause__, KeyboardInterrupt):  # which the storage takes for a damage
            raise error.__cause__ from None
        raise _unreadable(directory, step) from error
    params = loaded["state"][kind]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):  # what is missing is left so
        raise _unreadable(directory, step)
    return params


def _unreadable(directory: pathlib.Path, step: int) -> UserError:
    others = ", ".join(str(other) for other in saved_steps(directory) if other != step)
    return UserError(
        f"the checkpoint {directory / str(step)} cannot be read: it is damaged, cut short, or of another model; "
        + (f"there are those of steps {others} too" if others else "there is no other")
    )


def mean(trees: Iterable[Any]) -> Any:
    """The mean of trees of parameters, in float32, on the host; they are taken one at a time."""
    total, count = None, 0
    for tree in trees:
        tree = jax.tree.map(np.float32, jax.device_get(tree))
        total, count = tree if total is None else jax.tree.map(np.add, total, tree), count + 1
    return jax.tree.map(lambda leaf: leaf / np.float32(count), total)


def describe(steps: Sequence[int], *, ema: bool = False) -> str:
    """Which parameters these are, for people."""
    listed = ", ".join(f"{step:,}" for step in steps)
    if ema:
        return f"the moving average at step {listed}"
    return f"the parameters of step {listed}" if len(steps) == 1 else f"the mean of the parameters at steps {listed}"


def _on_first_device(like: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)


class Checkpoints:
    """The checkpoints of a run.

    Kept are the newest, the latest `keep` regular ones (those at the interval, which averages take), and the best by
    validation BLEU of those that were saved with one.

    Args:
      directory: where they lie, one folder a step.
      every: the interval, in steps.
      keep: how many regular ones to keep.
    """

    def __init__(self, directory: pathlib.Path, *, every: int, keep: int):
        self._directory = directory.resolve()
        self._every, self._keep = every, keep
        self._checkpointer = _training.Checkpointer(
            self._directory,
            save_decision_policy=_training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=self,
            cleanup_tmp_directories=True,
        )

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's question which of these, ascending by step, to keep."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*_regular(steps, self._every)[-self._keep :], *steps[-1:]}
        scored = [c for c in checkpoints if c.metrics]
        if scored:
            kept.add(max(scored, key=lambda c: (c.metrics["bleu"], c.step)).step)
        return [step in kept for step in steps]

    def require_room(self, state: Any) -> None:
        """Checks that the disk has room for one more checkpoint of such a state.

        Raises:
          UserError: it has not.
        """
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._directory.parent).free
        if free < needed:
            raise UserError(
                f"a checkpoint needs {needed / 1e6:,.1f} MB and the disk of {self._directory} has {free / 1e6:,.1f} MB "
                "left; make room there: the same command goes on from the last whole checkpoint"
            )

    def save(self, state: TrainState, bleu: float | None = None) -> None:
        """Starts writing a state; training may go on at once.

        Args:
          state: on one device, as `Parallel.unreplicate` gives it.
          bleu: what is evaluated of it reaches on the validation split.

        Raises:
          UserError: this one has no room, or the one before could not be written.
        """
        self.require_room(state)
        # A copy: the next step is given these buffers to overwrite while they are still being written.
        state = jax.tree.map(jnp.copy, state)
        metrics = None if bleu is None else {"bleu": bleu}
        with self._explaining():
            self._checkpointer.save_checkpointables_async(int(state.step), {"state": state}, metrics=metrics)

    def restore(self, like: TrainState, step: int) -> TrainState:
        """The state of a step, on the first device.

        Args:
          like: a tree of its shapes.
          step: one of `steps()`.
        """
        try:
            return self._checkpointer.load_checkpointables(step, {"state": _on_first_device(like)})["state"]
        except Exception as error:  # of whatever kind the storage has for it
            raise _unreadable(self._directory, step) from error

    def steps(self) -> list[int]:
        """The steps that can be restored, ascending."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def average(self, params: Any, step: int, count: int) -> tuple[Any, list[int]]:
        """The mean of the parameters of the last `count` checkpoints up to a step, as `to_average` chooses them.

        Args:
          params: of that step, on one device; its checkpoint need not be there yet.
          step: the newest.
          count: how many to take; fewer where there are fewer.

        Returns:
          The parameters in float32, on the host, and the steps that were taken.
        """
        with self._explaining():
            self._checkpointer.wait()  # the newest may still be on its way to the disk
        taken = to_average([*(s for s in self.steps() if s < step), step], self._every, count)
        return mean(params if s == step else load_params(self._directory, s, params) for s in taken), taken

    def close(self) -> None:
        """Waits for what is still being written."""
        with self._explaining():
            self._checkpointer.close()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # what was raised in the background, of whatever kind the storage has for it
            raise UserError(
                f"a checkpoint could not be written to {self._directory}: {error}; those that are whole are untouched, "
                "and the same command goes on from the last"
            ) from error

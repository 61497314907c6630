"""Checkpoints: written in the background, kept by rule, restored."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from transformer_flax.errors import UserError
from transformer_flax.training.averaging import Choice, load_params, mean, on_first_device, reading, regular, to_average
from transformer_flax.training.step import TrainState

_training: Any = ocp.training  # its policies do not have the types that its checkpointer asks for


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
        kept = {*regular(steps, self._every)[-self._keep :], *steps[-1:]}
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

        Raises:
          UserError: the checkpoint cannot be read.
        """
        with reading(self._directory, step):
            return self._checkpointer.load_checkpointables(step, {"state": on_first_device(like)})["state"]

    def steps(self) -> list[int]:
        """The steps that can be restored, ascending."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def average(self, params: Any, step: int, count: int) -> tuple[Any, Choice]:
        """The mean of the parameters of the last `count` checkpoints up to a step, as `to_average` chooses them.

        Args:
          params: of that step, on one device; its checkpoint need not be there yet.
          step: the newest.
          count: how many to take; fewer where there are fewer.

        Returns:
          The parameters in float32, on the host, and the choice that was made.
        """
        with self._explaining():
            self._checkpointer.wait()  # the newest may still be on its way to the disk
        taken = to_average([*(s for s in self.steps() if s < step), step], self._every, count)
        return mean(params if s == step else load_params(self._directory, s, params) for s in taken), Choice(taken)

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

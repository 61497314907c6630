"""Checkpoints: written in the background, restored, averaged."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from transformer_flax.errors import UserError
from transformer_flax.training.step import TrainState

_training: Any = ocp.training  # its policies do not have the types that its checkpointer asks for
_policies = _training.preservation_policies


class Checkpoints:
    """The checkpoints of a run: the latest `keep`, and the best by validation BLEU.

    Args:
      directory: where they lie, one folder a step.
      keep: how many of the latest to keep.
    """

    def __init__(self, directory: pathlib.Path, keep: int):
        latest = _policies.LatestN(n=keep)
        best = _policies.BestN(
            get_metric_fn=lambda metrics: metrics["bleu"], n=1, keep_checkpoints_without_metrics=False
        )
        self._directory = directory.resolve()
        self._checkpointer = _training.Checkpointer(
            self._directory,
            save_decision_policy=_training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=_policies.AnyPreservationPolicy([latest, best]),
            cleanup_tmp_directories=True,
        )

    def require_room(self, state: TrainState) -> None:
        """Checks that the disk has room for one more checkpoint of such a state.

        Raises:
          UserError: it has not.
        """
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._directory.parent).free
        if free < needed:
            raise UserError(
                f"a checkpoint needs {needed / 1e6:,.1f} MB and the disk of {self._directory} has {free / 1e6:,.1f} MB "
                "left; make room there: the same command goes on from the last whole checkpoint"
            )

    def save(self, state: TrainState, bleu: float | None) -> None:
        """Starts writing a state; training may go on at once.

        Raises:
          UserError: this one has no room, or the one before could not be written.
        """
        self.require_room(state)
        metrics = None if bleu is None else {"bleu": bleu}
        # A copy: the next step is given these buffers to overwrite while they are still being written.
        state = jax.tree.map(jnp.copy, state)
        with self._explaining():
            self._checkpointer.save_checkpointables_async(int(state.step), {"state": state}, metrics=metrics)

    def restore(self, like: TrainState, step: int) -> TrainState:
        """The state of a step, on the devices of `like`."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        return self._checkpointer.load_checkpointables(step, {"state": abstract})["state"]

    def steps(self) -> list[int]:
        """The steps that can be restored, ascending."""
        return sorted(checkpoint.step for checkpoint in self._checkpointer.checkpoints)

    def average(self, like: TrainState, steps: list[int], *others: Any) -> Any:
        """The mean of the parameters of checkpoints at `steps` and of `others`, in float32 on the host."""
        with self._explaining():
            self._checkpointer.wait()  # the newest may still be on its way to the disk
        trees = [*others, *(self.restore(like, step).params for step in steps)]
        return jax.tree.map(lambda *leaves: np.mean([np.asarray(x, np.float32) for x in leaves], axis=0), *trees)

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

"""Checkpoints: written in the background, restored, averaged."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

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
        self._checkpointer = _training.Checkpointer(
            directory.resolve(),
            save_decision_policy=_training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=_policies.AnyPreservationPolicy([latest, best]),
            cleanup_tmp_directories=True,
        )

    def save(self, state: TrainState, bleu: float | None) -> None:
        """Starts writing a state; training may go on at once."""
        metrics = None if bleu is None else {"bleu": bleu}
        # A copy: the next step is given these buffers to overwrite while they are still being written.
        state = jax.tree.map(jnp.copy, state)
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
        self._checkpointer.wait()  # the newest may still be on its way to the disk
        trees = [*others, *(self.restore(like, step).params for step in steps)]
        return jax.tree.map(lambda *leaves: np.mean([np.asarray(x, np.float32) for x in leaves], axis=0), *trees)

    def close(self) -> None:
        """Waits for what is still being written."""
        self._checkpointer.close()

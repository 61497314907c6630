"""Runs that differ in their seed alone, trained as one program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.errors import UserError
from transformer_flax.training.multihost import share


class Seeds:
    """An axis of `count` seeds in front of every array of a state, a batch or metrics: [count, ...]; one has none.

    A batch has the same shape for every seed, so that each run keeps its own order of the data.
    """

    def __init__(self, count: int):
        self.count = count

    def stack(self, trees: Sequence[Any]) -> Any:
        """The trees of all seeds, with arrays [...], as one with arrays [count, ...]."""
        if self.count == 1:
            return trees[0]

        def stacked(*leaves):  # on the host what is there: a batch is not to go to a device, and back, before its time
            return (np if isinstance(leaves[0], np.ndarray) else jnp).stack(leaves)

        return jax.tree.map(stacked, *trees)

    def split(self, tree: Any) -> list[Any]:
        """The tree of each seed: the inverse of `stack`."""
        if self.count == 1:
            return [tree]
        return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(self.count)]

    def map(self, step: Callable) -> Callable:
        """A step of all seeds at once: of trees as `stack` makes them, to such trees."""
        return step if self.count == 1 else jax.vmap(step)


def check_seeds(config: ConfigDict, seeds: Sequence[int]) -> None:
    """Checks that runs of `config` with these seeds can be trained together.

    Raises:
      UserError: they cannot.
    """
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UserError(f"--seeds={','.join(map(str, seeds))}: name different seeds, such as 0,1,2")
    if len(seeds) == 1:
        return
    if config.eval.patience:
        raise UserError(
            f"config.eval.patience is {config.eval.patience}; seeds that are trained together all make config.steps "
            "steps: set it to 0, or train the seeds one by one"
        )
    if config.parallel.mode != "jit" or config.parallel.shard_params:
        raise UserError(
            f"config.parallel.mode is {config.parallel.mode!r} and shard_params {config.parallel.shard_params}; "
            "several seeds are trained together with 'jit' and False only"
        )
    if share()[1] > 1:
        raise UserError("several seeds are trained together by one process, without --distributed")

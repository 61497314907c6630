"""Trains runs that differ only in their seed as one program."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.console import Progress, counted
from transformer_flax.errors import UserError
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.checkpoints import Checkpoints, common_steps, resume_or_begin
from transformer_flax.training.compiled import Programs
from transformer_flax.training.config_fields import require_only
from transformer_flax.training.evaluation import Evaluation
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.loop import fit
from transformer_flax.training.multihost import share
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.setup import checked_config, prepare_seeds, set_up_devices
from transformer_flax.training.step import Metrics, TrainState
from transformer_flax.training.trainer import Trainer


def train_seeds(
    config: ConfigDict, seeds: Sequence[int], workdir: str | os.PathLike[str], *, profile: bool = False
) -> list[dict[str, Evaluation]]:
    """Trains `config` with different seeds as one program: each seed as `train` would, in `<workdir>/seed<k>`.

    The runs resume from the newest step for which all of them have a checkpoint.

    Raises:
      UserError: as `train` does. An error in one run ends all runs.
      Interrupted: a signal asked the runs to end; no finished work is lost.
    """
    check_seeds(config)
    directories = [RunDirectory(pathlib.Path(workdir) / f"seed{seed}") for seed in seeds]
    begun = any(directory.config_file.exists() for directory in directories)
    if RunDirectory(workdir).config_file.exists() and not begun:
        raise UserError(f"{workdir} holds a run, and its seeds would lie inside it; choose another --workdir")
    config = checked_config(config, *directories)
    configs = [ConfigDict({**config.to_dict(), "seed": seed}) for seed in seeds]
    intervals = config.checkpoint.every, config.eval.every or config.steps
    # Not the last step: a run whose first checkpoint is of the last step counts as trained alone.
    first = min(*intervals, config.steps - 1)
    common_steps({directory.path: saved_steps(directory.checkpoints) for directory in directories}, first)
    with Progress() as progress, contextlib.ExitStack() as stack:
        parallel = set_up_devices(configs[0], progress, f", {counted(len(seeds), 'seed')} at once")
        runs = prepare_seeds(configs, directories, progress)
        programs = Programs(runs[0], parallel, progress)
        interruption = stack.enter_context(Interruption())
        checkpoints = {}
        for run in runs:
            stack.enter_context(run.directory.lock())
            opened = Checkpoints(run.directory.checkpoints, seed=run.config.seed, **run.config.checkpoint)
            checkpoints[f"seed {run.config.seed}: "] = stack.enter_context(contextlib.closing(opened))
        state, saved, step = resume_or_begin(programs, checkpoints, progress, combine=stack_trees, first=first)
        trainers = []
        for run, (label, own), totals in zip(runs, checkpoints.items(), saved, strict=True):
            given = run, programs, own, progress, interruption
            trainer = Trainer(*given, start=step, totals=totals, label=label, runs_at_once=len(runs))
            trainers.append(stack.enter_context(trainer))
        return fit(SeedsTrainer(trainers), state, profile=profile)


class SeedsTrainer:
    """The trainers of several seeds as one trainer. Each array of states, batches and metrics has a leading seed axis.

    The batches of a step have the same shape for every seed, so each run can keep its own order of the data.
    """

    def __init__(self, trainers: Sequence[Trainer]):
        self._trainers, first = trainers, trainers[0]
        self.start, self.progress, self.interruption = first.start, first.progress, first.interruption
        self.run = first.run  # `fit` needs only its config, its directory and the shapes of its batches
        self.seconds_left = first.seconds_left
        self.out_of_patience = first.out_of_patience  # never, as `check_seeds` allows no patience
        self.programs, self._parallel = first.programs, first.programs.parallel.behind_seeds()
        self.train_step = first.programs.steps.seeds_step

    def batch(self, step: int) -> Any:
        return self._parallel.shard(stack_trees([trainer.run.train[step - 1] for trainer in self._trainers]))

    def _each(self, method: Callable[..., Any], tree: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of each trainer with the trainer's part of a tree, a copy that is made when it is needed."""
        parts = (jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(len(self._trainers)))
        return [method(*each, *args, **kwargs) for each in zip(self._trainers, parts, strict=True)]

    def read(self, metrics: Metrics, step: int) -> None:
        self._each(Trainer.read, jax.device_get(metrics), step)

    def add_time(self, step: int, seconds: float) -> None:
        for trainer in self._trainers:
            trainer.add_time(step, seconds)

    def log(self, metrics: Metrics, step: int) -> None:
        self._each(Trainer.log, jax.device_get(metrics), step)

    def check_saving(self) -> None:
        for trainer in self._trainers:
            trainer.check_saving()

    def save(self, state: TrainState, *, must: bool) -> None:
        started = time.perf_counter()
        self._wait()
        self._each(Trainer.start_saving, state, must=must)
        for trainer in self._trainers:
            trainer.saving_seconds = time.perf_counter() - started

    def _wait(self) -> None:
        for trainer in self._trainers:
            trainer.end_saving()  # a failure ends all runs, as `check_seeds` allows no other config.on_write_failure
        # A checkpoint is deleted only once all runs have a later one, from which they would resume together.
        steps = [set(trainer.checkpoints.steps()) for trainer in self._trainers]
        for trainer in self._trainers:
            trainer.prune(max(set.intersection(*steps), default=0))

    def require_saved(self, state: TrainState, step: int) -> None:
        del state, step  # without config.eval.patience, a run ends at a step that was saved
        self._wait()

    def evaluate(self, state: TrainState, step: int, *, last: bool = False) -> list[dict[str, Evaluation]]:
        return self._each(Trainer.evaluate, state, step, last=last)

    def report(self, evaluations: Sequence[dict[str, Evaluation]], step: int) -> None:
        for trainer, own in zip(self._trainers, evaluations, strict=True):
            trainer.report(own, step)


def stack_trees(trees: Sequence[Any]) -> Any:
    """Stacks trees of the same shapes: arrays [...] -> [seeds, ...]. Arrays on the host stay on the host."""
    return jax.tree.map(lambda *leaves: (np if isinstance(leaves[0], np.ndarray) else jnp).stack(leaves), *trees)


def check_seeds(config: ConfigDict) -> None:
    """Checks that runs of `config` with several seeds can be trained together."""
    only = {
        "parallel.mode": "jit",
        "parallel.shard_params": False,
        "eval.patience": 0,
        "on_write_failure": "stop",
        "model.attention_implementation": "plain",  # JAX cannot map cuDNN's over seeds
    }
    require_only(config, only, "where seeds are trained together, each step of all of them at once")
    if share()[1] > 1:
        raise UserError("several seeds are trained together by one process, without --distributed")

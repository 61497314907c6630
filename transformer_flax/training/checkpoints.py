"""Checkpoints: written in the background, kept by rule, restored.

Several processes write one together, and each reads it by itself.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from orbax.checkpoint import v1 as ocp

from transformer_flax.errors import UserError
from transformer_flax.training.averaging import Choice, mean, to_average
from transformer_flax.training.checkpoint_files import (
    UnreadableError,
    load_params,
    load_seal,
    on_first_device,
    own_context,
    reading,
    require_intact,
    require_own,
    saved_steps,
    seal,
)
from transformer_flax.training.multihost import from_first, share
from transformer_flax.training.step import TrainState

HALF = ".orbax-checkpoint-tmp"  # how Orbax names what is not whole


class Checkpoints:
    """The checkpoints of a run.

    To be closed, which waits for what is still being written. `prune` keeps the latest `keep` regular ones
    (those at the interval, which averages take) and, of all, the best by validation score.

    Args:
      directory: where they lie, one folder a step.
      every: the interval, in steps.
      keep: how many regular ones to keep.
      seed: of the run.
    """

    def __init__(self, directory: pathlib.Path, *, every: int, keep: int, seed: int):
        self.run, self._directory = directory.parent, directory.resolve()
        self._every, self._keep, self._seed = every, keep, seed
        self._watcher = concurrent.futures.ThreadPoolExecutor(1)
        self._under_way: concurrent.futures.Future | None = None
        from_first(self._clear)

    @classmethod
    def of(cls, config: ConfigDict, directory: pathlib.Path) -> "Checkpoints":
        """The checkpoints that a run's config asks for."""
        return cls(directory, every=config.checkpoint.every, keep=config.checkpoint.keep, seed=config.seed)

    def _clear(self) -> None:
        """Makes the directory, and removes what a failed or killed write has left there."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for half in self._directory.glob(f"*{HALF}*"):
            # What cannot be removed costs room, and nothing else.
            half.unlink() if half.is_symlink() else shutil.rmtree(half, ignore_errors=True)

    def prune(self, newest: int, scores: Mapping[int, float]) -> None:
        """Deletes the checkpoints that are not kept, once a regular one follows them.

        Args:
          newest: a step; later checkpoints stay.
          scores: validation score by step, of parameters as they are in that step's checkpoint.
        """
        from_first(lambda: self._delete_old(newest, scores))  # the others wait, and find the room that it makes

    def _delete_old(self, newest: int, scores: Mapping[int, float]) -> None:
        steps = [step for step in saved_steps(self._directory) if step <= newest]
        regular = [step for step in steps if step % self._every == 0]  # others are of evaluations, or of the end
        if not regular or regular[-1] != steps[-1]:
            return
        kept = set(regular[-self._keep :])
        scored = [step for step in steps if step in scores]
        if scored:
            kept.add(max(scored, key=lambda step: (scores[step], step)))
        for step in sorted({*steps} - kept):
            folder = self._directory / str(step)
            with contextlib.suppress(OSError):  # what is left there costs room, and nothing else
                # Renamed first: a process that is killed leaves a whole checkpoint or none.
                shutil.rmtree(folder.rename(folder.with_name(f"{step}{HALF}")))

    def require_room(self, state: Any, count: int = 1) -> None:
        """Checks that the disk has room for `count` more checkpoints of such a state.

        Raises:
          UserError: it has not, or there is no such directory.
        """
        self._require_directory()
        needed = count * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            what = "a checkpoint needs" if count == 1 else f"{count} checkpoints need"
            raise UserError(
                f"{what} {needed / 1e6:,.1f} MB and the disk of {self._directory} has {free / 1e6:,.1f} MB "
                f"left; make room there: {self._afterwards()}"
            )

    def _require_directory(self) -> None:
        if not self._directory.is_dir():
            raise moved(self._directory)

    def _afterwards(self) -> str:
        """Says where the same command resumes after a failure."""
        saved = saved_steps(self._directory)
        return f"the same command resumes from step {saved[-1]:,}" if saved else "the same command begins anew"

    def save(self, state: TrainState, totals: Any) -> None:
        """Starts writing a state in the background.

        Args:
          state: as `Parallel.unreplicate` gives it.
          totals: what has been measured since the last time that it was logged, as JSON.

        Raises:
          UserError: this one has no room, or the one before could not be written.
        """
        self.wait()
        self.require_room(state)
        # A copy: the next step is given these buffers to overwrite while they are still being written.
        state = jax.tree.map(jnp.copy, state)
        with self._explaining():
            response = ocp.save_checkpointables_async(
                str(self._directory / str(state.step)), {"state": state}, custom_metadata=seal(vars(state), totals)
            )
        self._under_way = self._watcher.submit(response.result)

    def check(self) -> None:
        """Finds out whether the one that is being written has failed, without waiting for it.

        Raises:
          UserError: it has.
        """
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Waits for what is still being written.

        Raises:
          UserError: it could not be.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with self._explaining():
                under_way.result()

    def restore(self, like: TrainState, step: int) -> tuple[TrainState, Any]:
        """The state of a step, on the first device, and the totals that were saved with it.

        Args:
          like: a tree of its shapes.
          step: one of `steps()`.

        Raises:
          UnreadableError: it is damaged, or of another step or seed.
        """
        with reading(self._directory, step), own_context():
            folder = self._directory / str(step)
            sealed = load_seal(folder)
            require_own(sealed, step=step, seed=self._seed)
            state = ocp.load_checkpointables(str(folder), {"state": on_first_device(like)})["state"]
            for name, part in vars(state).items():
                require_intact(part, name, sealed)
            return state, sealed.totals

    def put_aside(self, step: int, why: str) -> pathlib.Path:
        """Renames a checkpoint, by the reason, so that it is no longer one of `steps()`; returns where it is."""
        folder = self._directory / str(step)
        aside = next(path for n in itertools.count(1) if not (path := folder.with_name(f"{step}.{why}.{n}")).exists())
        folder.rename(aside)
        return aside

    def steps(self) -> list[int]:
        """The steps that can be restored, ascending."""
        return from_first(lambda: saved_steps(self._directory))

    def average(self, params: Any, step: int, count: int) -> tuple[Any, Choice]:
        """The mean of the parameters of the last `count` checkpoints up to a step, as `to_average` chooses them.

        Args:
          params: of that step, on one device; its checkpoint need not be there yet.
          step: the newest.
          count: how many to take.

        Returns:
          The parameters in float32, on the host, and the choice that was made.

        Raises:
          UnreadableError: one that is taken is damaged.
        """
        self.wait()  # the newest may still be on its way to the disk
        choice = to_average(self.steps(), step, self._every, count)
        load = functools.partial(load_params, self._directory, like=params, seed=self._seed)
        return mean(params if s == step else load(s) for s in choice.steps), choice

    def can_read_another(self, step: int, params: Any) -> bool:
        """Whether a checkpoint of another step can be read, whose parameters have these shapes."""
        for other in reversed(self.steps()):
            if other != step:
                with contextlib.suppress(UnreadableError):
                    load_params(self._directory, other, params, seed=self._seed)
                    return True
        return False

    def close(self) -> None:
        """Waits for what is still being written.

        Raises:
          UserError: it could not be.
        """
        try:
            self.wait()
        finally:
            self._watcher.shutdown()

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of whatever kind the storage has for it
            self._require_directory()
            if share()[1] == 1:  # another process may be writing still
                self._clear()  # it takes room
            raise UserError(
                f"a checkpoint could not be written to {self._directory}: {error}; {self._afterwards()}"
            ) from error


def moved(folder: pathlib.Path) -> UserError:
    """The error of a run whose directory, or a folder in it, is gone."""
    return UserError(
        f"{folder} has been moved or deleted, and the run cannot be saved; put it back, or start it in another "
        "--workdir"
    )

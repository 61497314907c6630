"""Writes checkpoints in the background, deletes old ones, and resumes runs from the newest ones.

Several processes write a checkpoint together. Each process reads the checkpoint alone. The module `run_directory`
decides whether a config may resume a run.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import pathlib
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from transformer_flax.console import Progress
from transformer_flax.errors import UserError
from transformer_flax.training.averaging import Choice, mean, to_average
from transformer_flax.training.checkpoint_files import UnreadableError, load_params, load_parts, saved_steps, seal
from transformer_flax.training.compiled import Programs
from transformer_flax.training.multihost import from_first, share
from transformer_flax.training.step import TrainState

HALF = ".orbax-checkpoint-tmp"  # in Orbax's names of incomplete checkpoints


class Checkpoints:
    """The checkpoints of a run.

    Must be closed; `close` waits for the checkpoint that is still being written. Regular checkpoints are those at
    multiples of `every` steps; averages use them. `prune` keeps the latest `keep` regular checkpoints, and the latest
    two of those after them, from evaluations or interruptions. It also keeps the best of all by validation score.
    """

    def __init__(self, directory: pathlib.Path, *, every: int, keep: int, seed: int):
        self.workdir, self._directory = directory.parent, directory.resolve()
        self._every, self._keep, self.seed = every, keep, seed
        self._watcher = concurrent.futures.ThreadPoolExecutor(1)
        self._under_way: concurrent.futures.Future | None = None
        from_first(self._clear)

    def _clear(self) -> None:
        """Creates the directory and removes the incomplete checkpoints of failed or killed writes."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for half in self._directory.glob(f"*{HALF}*"):
            shutil.rmtree(half, ignore_errors=True)  # files that cannot be removed only take disk space

    def prune(self, newest: int, scores: Mapping[int, float]) -> None:
        """Deletes the checkpoints that are not kept. Checkpoints after `newest` stay.

        The score of a step is the validation score of the parameters in its checkpoint.
        """
        from_first(lambda: self._delete_old(newest, scores))  # the other processes wait for the free disk space

    def _delete_old(self, newest: int, scores: Mapping[int, float]) -> None:
        steps = [step for step in saved_steps(self._directory) if step <= newest]
        regular = [step for step in steps if step % self._every == 0]
        later = [step for step in steps if step > max(regular, default=0)]
        kept = {*regular[-self._keep :], *later[-2:]}  # the second is there if the latest is damaged
        scored = [step for step in steps if step in scores]
        if scored:
            kept.add(max(scored, key=lambda step: (scores[step], step)))
        for step in sorted({*steps} - kept):
            folder = self._directory / str(step)
            with contextlib.suppress(OSError):  # files that are left only take disk space
                # Renamed first, so that a killed process leaves a complete checkpoint or none.
                shutil.rmtree(folder.rename(folder.with_name(f"{step}{HALF}")))

    def require_room(self, state: Any, count: int = 1) -> None:
        """Checks that the disk has space for `count` more checkpoints of this state."""
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

        `totals` are the metrics measured since the last log, as JSON. Fails if the previous checkpoint could not be
        written.
        """
        self.wait()
        self.require_room(state)
        context = ocp.Context()
        context.array.saving.enable_write_sharding_file = False  # up to a quarter of the time, and nothing reads it
        with self._explaining(), context:
            # Orbax holds the values when this call returns, so the next step may overwrite the buffers of the state.
            response = ocp.save_checkpointables_async(
                str(self._directory / str(state.step)), {"state": state}, custom_metadata=seal(vars(state), totals)
            )
        self._under_way = self._watcher.submit(response.result)

    def check(self) -> None:
        """Checks whether the current write has failed, without waiting for the write."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the current checkpoint is written."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with self._explaining():
                under_way.result()

    def restore(self, like: TrainState, step: int) -> tuple[TrainState, Any]:
        """Restores the state of a step to the first device, with the totals that were saved beside the state.

        Raises:
          UnreadableError: the checkpoint is damaged, or of another model, step or seed.
        """
        parts, totals = load_parts(self._directory, step, vars(like), seed=self.seed)
        return like.replace(**parts), totals

    def put_aside(self, step: int, why: str) -> pathlib.Path:
        """Renames a checkpoint so that `steps()` leaves it out. Returns the new path, whose name contains `why`."""
        folder = self._directory / str(step)
        aside = next(path for n in itertools.count(1) if not (path := folder.with_name(f"{step}.{why}.{n}")).exists())
        folder.rename(aside)
        return aside

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, ascending, also a damaged one that is not put aside."""
        return from_first(lambda: saved_steps(self._directory))

    def average(self, params: Any, step: int, count: int, say: Callable[[str], Any] = print) -> tuple[Any, Choice]:
        """Returns the mean of the parameters of the last `count` checkpoints up to a step, and which ones these are.

        `to_average` chooses them. `params` are the parameters at `step`, on one device; the checkpoint of `step` need
        not exist yet. The mean is in float32, on the host. A damaged checkpoint is put aside, which `say` reports, and
        the others are averaged.

        Raises:
          UnreadableError: a checkpoint cannot be read, and several processes train; or no other checkpoint can be read
            either, so a failing disk or device is likelier than damage.
        """
        self.wait()  # the newest checkpoint may not be on the disk yet
        load = functools.partial(load_params, self._directory, like=params, seed=self.seed)
        while True:
            choice = to_average(self.steps(), step, self._every, count)
            try:
                return mean(params if s == step else load(s) for s in choice.steps), choice
            except UnreadableError as error:
                if share()[1] > 1 or not self._can_read_another(error.step, params):
                    raise
                aside = self.put_aside(error.step, "damaged")
                say(f"WARNING: {error}; it is put aside as {aside.name}")

    def _can_read_another(self, step: int, params: Any) -> bool:
        """Returns whether a checkpoint of another step can be read, with parameters of these shapes."""
        for other in reversed(self.steps()):
            if other != step:
                with contextlib.suppress(UnreadableError):
                    load_params(self._directory, other, params, seed=self.seed)
                    return True
        return False

    def close(self) -> None:
        """Waits until the current checkpoint is written."""
        try:
            self.wait()
        finally:
            self._watcher.shutdown()

    @contextlib.contextmanager
    def _explaining(self) -> Generator[None]:
        try:
            yield
        except Exception as error:  # the storage raises errors of many types
            self._require_directory()
            if share()[1] == 1:  # of several processes, another one may still be writing
                self._clear()  # the incomplete checkpoint takes disk space
            raise UserError(
                f"a checkpoint could not be written to {self._directory}: {error}; {self._afterwards()}"
            ) from error


def moved(folder: pathlib.Path) -> UserError:
    """Returns the error for a run whose working directory, or a folder in it, is gone."""
    return UserError(
        f"{folder} has been moved or deleted, and the run cannot be saved; put it back, or start it in another "
        "--workdir"
    )


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

"""Trains a run: its preparation, and the loop from the first step to the last."""

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import jax
from ml_collections import ConfigDict

from transformer_flax.console import Progress
from transformer_flax.prefetch import prefetch
from transformer_flax.training.checkpoints import Checkpoints, resume_or_begin
from transformer_flax.training.compiled import Programs
from transformer_flax.training.evaluation import Evaluation
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.multihost import agreed_stop, is_first
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.setup import PreparedRun, checked_config, prepare_run, set_up_devices
from transformer_flax.training.step import Metrics, TrainState
from transformer_flax.training.trainer import Trainer

if TYPE_CHECKING:
    from transformer_flax.training.vectorized_seeds import SeedsTrainer

# The steps of a session to profile: most shapes are compiled by then. A shorter session has its last five steps
# profiled.
PROFILED = slice(20, 25)


def train(config: ConfigDict, workdir: str | os.PathLike[str], *, profile: bool = False) -> dict[str, Evaluation]:
    """Trains a run in a working directory. Resumes from the latest checkpoint, if one exists.

    With `profile`, some steps are profiled, for TensorBoard or Perfetto.

    Returns:
      The last evaluation of each split.

    Raises:
      UserError: the config, the data or the working directory is refused, before any long work starts; or too many
        losses or gradients in a row are not finite; or the disk is full.
      Interrupted: a signal asked the run to end; no finished work is lost.
    """
    directory = RunDirectory(workdir)
    config = checked_config(config, directory)
    with Progress(quiet=not is_first()) as progress:
        parallel = set_up_devices(config, progress)
        run = prepare_run(config, directory, progress)
        programs = Programs(run, parallel, progress)
        with open_trainer(run, programs, progress) as (trainer, state):
            return fit(trainer, state, profile=profile)


@contextlib.contextmanager
def open_trainer(run: PreparedRun, programs: Programs, progress: Progress) -> Generator[tuple[Trainer, TrainState]]:
    """Context manager: resumes or begins a run, and yields its trainer and its state on the devices."""
    config, directory = run.config, run.directory
    with (
        Interruption() as interruption,  # first, so that a signal does not end the run while a checkpoint is written
        directory.lock(),
        contextlib.closing(Checkpoints(directory.checkpoints, seed=config.seed, **config.checkpoint)) as checkpoints,
    ):
        state, [totals], step = resume_or_begin(programs, {"": checkpoints}, progress)
        with Trainer(run, programs, checkpoints, progress, interruption, start=step, totals=totals) as trainer:
            yield trainer, state


def fit(trainer: "Trainer | SeedsTrainer", state: TrainState, *, profile: bool = False) -> Any:
    """Trains from the trainer's current step to the last step, and then evaluates all splits.

    The state is at the trainer's current step, on the devices. With `profile`, the profile of some steps is written
    into the working directory. Returns what `trainer.evaluate` returns after the last step.
    """
    config, folder, progress = trainer.run.config, trainer.run.directory.profile, trainer.progress
    step, steps = trainer.start, range(trainer.start + 1, config.steps + 1)
    if not steps:
        progress.say(f"the run has ended at step {step:,} already, so it is only evaluated; for more: --config.steps=N")
    elif _evaluates_after(step, config):  # missing if it was interrupted, or if this was the last step
        trainer.evaluate(state, step)
    if steps and trainer.out_of_patience(step):
        steps = range(0)

    on_cpu = jax.default_backend() == "cpu"  # on a CPU, a sharded step that overtakes another step deadlocks
    if steps and not on_cpu and jax.process_count() == 1:  # several processes would wait for each other's programs
        _compile_ahead(trainer, state)
    unread: Metrics | None = None  # metrics of the previous step, read while the device computes the next step
    with (
        progress.bar("training", step) as update,
        contextlib.closing(prefetch(trainer.batch, steps)) as batches,
        contextlib.ExitStack() as trace,
    ):
        some = PROFILED if len(steps) >= PROFILED.stop else slice(-5, None)
        profiled = steps[some] if profile and is_first() else range(0)
        started = time.perf_counter()
        for step in steps:
            if step in profiled[:1]:
                trace.enter_context(jax.profiler.trace(str(folder)))
            compilations = trainer.programs.compilations
            state, metrics = trainer.train_step(state, next(batches))
            if on_cpu:
                jax.block_until_ready(state)
            if unread is not None:
                trainer.read(unread, step - 1)
            unread = metrics

            last, interrupted = step == config.steps, agreed_stop(trainer.interruption.asked)
            evaluate = _evaluates_after(step, config)
            # An evaluation may end a run with patience, so its step is logged too, before the checkpoint is written.
            log = last or step % config.log.every == 0 or (evaluate and config.eval.patience > 0)
            save = last or evaluate or interrupted or step % config.checkpoint.every == 0
            if log or save:  # the log and the checkpoint include this step
                trainer.read(metrics, step)
                unread = None
            ended = time.perf_counter()
            if trainer.programs.compilations == compilations:  # a step's time excludes compilation
                trainer.add_time(step, ended - started)
            started = ended  # an accelerator computes on while the host goes through the rest
            if step in profiled[-1:]:
                jax.block_until_ready(state)
                trace.close()
                progress.say(f"profile of steps {profiled[0]:,} to {step:,}: {folder}")

            if log:
                trainer.log(metrics, step)
            update(step, config.steps, left=trainer.seconds_left(step))
            trainer.check_saving()
            if save:
                trainer.save(state, must=interrupted or last)
            if interrupted and not last:
                trainer.require_saved(state, step)
                trainer.interruption.end(f"after step {step:,}, which is saved")
            if evaluate:
                trainer.evaluate(state, step)
                if trainer.out_of_patience(step):
                    break
            if log or save or step in profiled[-1:]:  # the device has waited for the host
                started = time.perf_counter()

    if profile and not (profiled and step >= profiled[0]):
        progress.say("nothing was profiled, as the run ended before")
    if step > trainer.start:
        trainer.require_saved(state, step)
    evaluations: Any = trainer.evaluate(state, step, last=True)  # of one run, or a list of those of several
    trainer.report(evaluations, step)
    return evaluations


def _compile_ahead(trainer: "Trainer | SeedsTrainer", state: TrainState) -> None:
    """Compiles the step for all batch shapes in parallel. JAX keeps the programs for later calls.

    For a large model, each program takes a minute of one core. A CPU's compiler uses all cores for one program.
    """
    with (
        trainer.progress.bar("compiling") as update,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        first = trainer.run.train.first_of_each_shape()
        lowered = [trainer.train_step.lower(state, trainer.batch(k + 1)) for k in first]
        programs = [pool.submit(each.compile) for each in lowered]
        for done, program in enumerate(concurrent.futures.as_completed(programs), start=1):
            program.result()
            update(done, len(programs))


def _evaluates_after(step: int, config: ConfigDict) -> bool:
    """Returns whether an evaluation during training follows a step. The last step has the final evaluation."""
    every = config.eval.every
    return every > 0 and step > 0 and step % every == 0 and step != config.steps

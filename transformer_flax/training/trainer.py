"""The trainer of a run: logs, saves and evaluates the train state for the training loop."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from transformer_flax.console import Progress, duration
from transformer_flax.model.flops import training_flops
from transformer_flax.model.registry import kind_of
from transformer_flax.training.averaging import EMA, Choice
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.compiled import Programs
from transformer_flax.training.evaluation import Evaluation
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.loss import passes
from transformer_flax.training.multihost import agreed_stop, stop_asked
from transformer_flax.training.peak_flops import data_sheet_flops, measured_flops
from transformer_flax.training.resume import resume_or_begin
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.run_writer import RunWriter
from transformer_flax.training.setup import Data
from transformer_flax.training.step import Metrics, TrainState


@contextlib.contextmanager
def open_trainer(
    config: ConfigDict,
    directory: RunDirectory,
    data: Data,
    programs: Programs,
    progress: Progress,
    interruption: Interruption,
) -> Iterator[tuple["Trainer", TrainState]]:
    """Context manager: resumes or begins a run, and yields its trainer and its state on the devices."""
    with (
        directory.lock(),
        contextlib.closing(Checkpoints(directory.checkpoints, seed=config.seed, **config.checkpoint)) as checkpoints,
    ):
        state, [totals], step = resume_or_begin(programs, [checkpoints], [config.seed], progress)
        with RunWriter(
            config, directory, data, programs.task, checkpoints, progress, step=step, totals=totals
        ) as writer:
            yield Trainer(config, data, programs, writer, interruption, step), state


class Trainer:
    """The trainer of one run, which resumes from the step `start`.

    `interruption` ends an evaluation when a signal asks for it. `runs_at_once` is the number of runs on these devices.
    """

    def __init__(
        self,
        config: ConfigDict,
        data: Data,
        programs: Programs,
        writer: RunWriter,
        interruption: Interruption,
        start: int,
        *,
        runs_at_once: int = 1,
    ):
        self.start = start
        self.config, self.data, self.writer = config, data, writer
        self._programs, self._parallel, self._interruption = programs, programs.parallel, interruption
        self._runs_at_once = runs_at_once
        self._steps_per_second: float | None = None  # measured at the last log
        self._evaluation_seconds = 0.0  # the time of the last split that was evaluated
        self.saving_seconds = 0.0  # how long the steps last waited for a checkpoint; of all runs at once
        self.train_step = programs.steps.train_step

    @property
    def compilations(self) -> int:
        """The number of programs compiled for steps so far."""
        return sum(self._programs.compilations.values())

    def batch(self, step: int) -> Any:
        """Returns the batch of a step, on the devices. Steps count from 1."""
        return self._parallel.shard(self.data.train[step - 1])

    def read(self, metrics: Metrics, step: int) -> None:
        """Waits for the metrics of a step and adds them to the meter."""
        self.writer.read(self._parallel.unreplicate(jax.device_get(metrics)), step)

    def add_time(self, step: int, seconds: float) -> None:
        """Adds a step's time, tokens and FLOPs to the meter."""
        lengths = self.data.train.lengths(step - 1)
        model = self._programs.model.config
        tokens = sum(int(lengths[side].sum()) for side in kind_of(model).reads)
        flops = passes(self.config) * training_flops(model, *lengths.values())
        self.writer.meter.add_time(seconds, tokens, flops)

    def seconds_left(self, step: int) -> float | None:
        """Returns the estimated seconds of what comes after `step`; None if not known yet.

        This is the steps, evaluations and regular checkpoints. Each is assumed to take as long as the last ones.
        """
        if not self._steps_per_second:
            return None
        steps, every = self.config.steps, self.config.eval.every
        checkpoints = steps // self.config.checkpoint.every - step // self.config.checkpoint.every
        on_the_way = max(0, (steps - 1) // every - step // every) if every else 0
        evaluations = (on_the_way + len(self._programs.evaluators)) * self._runs_at_once
        waiting = evaluations * self._evaluation_seconds + checkpoints * self.saving_seconds
        return (steps - step) / self._steps_per_second + waiting

    def log(self, metrics: Metrics, step: int) -> None:
        """Writes the metrics since the last log and the gradient's norm at this step. Prints a summary."""
        metrics = self._parallel.unreplicate(jax.device_get(metrics))
        # The updates made before this step. If this step's update was skipped, `skipped` already counts it.
        updates = step - 1 - metrics.skipped + (metrics.skipped_in_a_row > 0)
        learning_rate = float(self._programs.schedule(updates))
        values = {
            "learning_rate": learning_rate,
            "grad_norm": float(metrics.grad_norm),
            "skipped": int(metrics.skipped),
        }
        means, rates = self.writer.meter.means(), self.writer.meter.rates()
        if rates:
            devices = 1 if jax.default_backend() == "cpu" else self._parallel.num_devices  # CPU devices share all cores
            reached = self._runs_at_once * rates["flops_per_second"] / devices
            rates["mfu"] = reached / measured_flops(self.config.model.dtype)
            if peak := data_sheet_flops(jax.local_devices()[0].device_kind, self.config.model.dtype):
                rates["mfu_data_sheet"] = reached / peak
        if self._runs_at_once > 1:
            rates["seeds_at_once"] = self._runs_at_once
        self.writer.log(step, {**values, **rates})
        shown = [f"lr {learning_rate:.2e}"]
        if "loss" in means:  # otherwise, all steps since the last log were skipped
            shown = [f"loss {means['loss']:.3f}", f"ppl {means['perplexity']:.2f}", *shown]
        if "mfu" in rates:
            self._steps_per_second = rates["steps_per_second"]
            sheet = f" ({rates['mfu_data_sheet']:.0%} of the data sheet's peak)" if "mfu_data_sheet" in rates else ""
            shown += [f"{rates['tokens_per_second']:,.0f} tokens/s", f"MFU {rates['mfu']:.0%}{sheet}"]
            shown += [f"{self._steps_per_second:.2f} steps/s", f"{duration(self.seconds_left(step) or 0)} left"]
        self.writer.row(f"step {step:>7,}/{self.config.steps:,}", shown, cut=True)  # the bar also shows the time left

    def check_saving(self) -> None:
        """Checks whether the current checkpoint has failed, without waiting for it."""
        with self.writer.writing():
            self.writer.checkpoints.check()

    def save(self, state: TrainState, *, must: bool) -> None:
        """Starts writing a checkpoint of a state on the devices, once the previous checkpoint is written.

        With `must`, a failure ends the run, whatever config.on_write_failure says.
        """
        started = time.perf_counter()
        self.wait(must=False)
        self.writer.save(self._parallel.unreplicate(state), must=must)
        self.saving_seconds = time.perf_counter() - started

    def wait(self, *, must: bool) -> None:
        """Waits until the last checkpoint is written, and only then deletes old checkpoints. For `must`, see `save`."""
        self.writer.wait(must=must)
        self.writer.prune(max(self.writer.checkpoints.steps(), default=0))

    def require_saved(self, state: TrainState, step: int) -> None:
        """Waits until the checkpoint of a step is written. Writes it if config.on_write_failure ignored a failure."""
        self.wait(must=True)
        if step not in self.writer.checkpoints.steps():
            self.save(state, must=True)
            self.wait(must=True)

    def is_evaluated(self, step: int) -> bool:
        """Returns whether the evaluation of a step is written."""
        return self.writer.is_evaluated(step)

    def out_of_patience(self, step: int) -> bool:
        """Returns whether config.eval.patience ends the run at this step; if so, prints a message."""
        return self.writer.out_of_patience(step)

    def evaluate(self, state: TrainState, step: int, *, last: bool = False) -> dict[str, Evaluation]:
        """Evaluates the validation split or, after the last step, all splits. Writes and prints the results.

        Raises Interrupted if the run was asked to end. A resumed run repeats this evaluation.
        """
        params, choice = self._evaluated_params(state, step, last)
        self.writer.say(f"evaluating {choice}")

        def check(*, alone: bool) -> None:
            """Ends the run if it was asked to end; `alone`: the other processes are waiting for the first process."""
            if (stop_asked if alone else agreed_stop)(self._interruption.asked):
                # With "go on", the checkpoint of this step may have failed. Several processes allow only "stop".
                if self.config.on_write_failure != "stop":
                    self.require_saved(state, step)
                self._interruption.end(f"while evaluating step {step:,}, which is saved")

        sentences = self.config.eval.final_sentences if last else self.config.eval.sentences
        splits = [*self._programs.evaluators] if last else ["valid"]
        evaluations = {}
        for split in splits:
            started = time.perf_counter()
            evaluations[split] = self._programs.evaluators[split](params, check=check, max_sentences=sentences)
            self._evaluation_seconds = time.perf_counter() - started
            self.writer.write_evaluation(split, step, evaluations[split], len(choice.steps), final=last)
        self.writer.show(splits[-1], evaluations[splits[-1]])
        return evaluations

    def _evaluated_params(self, state: TrainState, step: int, last: bool) -> tuple[Any, Choice]:
        """Returns the parameters to evaluate, and their checkpoints.

        Warns of missing checkpoints and, after the last step, of too few for the mean.
        """
        count = self.config.eval.final_average if last else self.config.eval.average
        if state.ema is not None:
            return self._parallel.unreplicate(state.ema), Choice([step], EMA)
        if count == 1:
            return self._parallel.unreplicate(state.params), Choice([step])
        self.writer.wait()  # a failed write ends the run or is reported, as config.on_write_failure says
        checkpoints, say = self.writer.checkpoints, self.writer.say
        averaged, choice = checkpoints.average(self._parallel.local(state.params), step, count, say)
        if warning := choice.warning(checkpoints.run, count if last else 1):
            say(f"WARNING: {warning}")
        return averaged, choice

    def report(self, evaluations: dict[str, Evaluation], step: int) -> None:
        """Prints the scores of the last evaluation, and where the run's files are."""
        task = self._programs.task
        self.writer.report(evaluations, step, {**self._programs.compilations, task.outputs: task.compilations})

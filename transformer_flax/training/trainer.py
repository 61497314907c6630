"""The trainer of a run: what the training loop calls to log, to save and to evaluate."""

import contextlib
import shlex
import time
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from transformer_flax.console import Progress, counted, duration
from transformer_flax.errors import UserError
from transformer_flax.model.flops import training_flops
from transformer_flax.model.registry import kind_of
from transformer_flax.training.averaging import EMA, Choice
from transformer_flax.training.checkpoints import Checkpoints, moved
from transformer_flax.training.compiled import Programs
from transformer_flax.training.evaluation import Evaluation
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.loss import passes
from transformer_flax.training.metrics import Meter, MetricsWriter, StepLines
from transformer_flax.training.multihost import agreed_stop, stop_asked
from transformer_flax.training.optimizer import keeps_average
from transformer_flax.training.peak_flops import data_sheet_flops, measured_flops
from transformer_flax.training.run_directory import is_out_of_patience
from transformer_flax.training.setup import PreparedRun
from transformer_flax.training.step import Metrics, TrainState
from transformer_flax.training.wandb_run import WandbRun

SAMPLES = 3  # outputs printed at an evaluation
LONGEST_SHOWN = 400  # characters of each


class Trainer:
    """Logs, saves and evaluates the train state of one run for `fit`. Writes the run's files and prints its messages.

    A context manager: closes the files at its end. The directory must be claimed and locked. The run resumes from the
    step `start`: lines of later steps are removed from the files. `totals` are those saved with the checkpoint of
    `start`. `interruption` ends an evaluation when a signal asks for it. `runs_at_once` is the number of runs on these
    devices. Every message begins with `label`, but for the lines below the table of `report`.
    """

    def __init__(
        self,
        run: PreparedRun,
        programs: Programs,
        checkpoints: Checkpoints,
        progress: Progress,
        interruption: Interruption,
        *,
        start: int = 0,
        totals: Any = None,
        label: str = "",
        runs_at_once: int = 1,
    ):
        self.run, self.start, self.checkpoints = run, start, checkpoints
        self.progress, self.interruption = progress, interruption
        self.programs, self._parallel = programs, programs.parallel
        self._label, self._runs_at_once = label, runs_at_once
        self._steps_per_second: float | None = None  # measured at the last log
        self._evaluation_seconds = 0.0  # the time of the last split that was evaluated
        self.saving_seconds = 0.0  # how long the steps last waited for a checkpoint; of all runs at once
        self.train_step = programs.steps.train_step
        self.meter = Meter(totals)  # of the steps since the last log
        self._metrics = MetricsWriter(
            run.directory.metrics_file,
            start,
            score=programs.task.score,
            seconds=(totals or {}).get("seconds", 0.0),
            send=lambda line: self._wandb.send(line),
        )
        self._skipped = StepLines(run.directory.skipped_file, start)
        run.directory.drop_outputs(programs.task.outputs, start)
        if not start and self._metrics.dropped:  # killed before its first checkpoint, or its checkpoints are gone
            last = max(line["step"] for line in self._metrics.dropped)
            self.say(f"WARNING: the run begins anew; its metrics and outputs up to step {last:,} are deleted")
        if start >= run.config.log.every and not self._metrics.written:
            self.say(f"WARNING: {run.directory.metrics_file} lacks the {start:,} steps so far")
        self._wandb = WandbRun(run.config, run.directory, self.say)  # last, so that no failure here leaves it open

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        with contextlib.ExitStack() as closing:  # closes all three, even if one fails, for example on a full disk
            closing.callback(self._wandb.close, failed=failure is not None)
            closing.callback(self._skipped.close)
            closing.callback(self._metrics.close)

    def say(self, text: str) -> None:
        self.progress.say(f"{self._label}{text}")

    @contextlib.contextmanager
    def _writing(self, *, must: bool = False) -> Generator[None]:
        """Context manager for anything that writes.

        If config.on_write_failure is "stop", or with `must`, a failure ends the run. Otherwise it is only reported.
        """
        try:
            yield
        except UserError as error:
            if must or self.run.config.on_write_failure == "stop":
                raise
            self.say(f"WARNING: {error}; the run continues without it")

    def batch(self, step: int) -> Any:
        """Returns the batch of a step, on the devices. Steps count from 1."""
        return self._parallel.shard(self.run.train[step - 1])

    def read(self, metrics: Metrics, step: int) -> None:
        """Waits for the metrics of a step and adds them to the meter. A skipped batch is reported and written instead.

        Ends the run if config.max_skipped updates in a row were not finite.
        """
        metrics = jax.device_get(metrics)
        if not metrics.skipped_in_a_row:
            self.meter.add(metrics.sums, metrics.counts)
            return
        loss, grad_norm = f"{metrics.sums['loss'] / metrics.counts['loss']}", f"{metrics.grad_norm}"
        measured = f"the loss is {loss} and the norm of the gradient {grad_norm}"
        self.say(f"step {step:>7,}: {measured}: this update is skipped")
        pairs = self.run.train.pairs(step - 1)
        corpus = self.run.train.corpus_of(step - 1)
        with self._writing():
            self._skipped.write(
                {
                    "step": step,
                    "loss": loss,
                    "grad_norm": grad_norm,
                    "pairs": pairs.tolist(),
                    "source": [corpus.source[i].tolist() for i in pairs],
                    "target": [corpus.target[i].tolist() for i in pairs],
                }
            )
        if metrics.skipped_in_a_row >= self.run.config.max_skipped:
            whole = self.checkpoints.steps()
            good = f"the last good checkpoint is of step {whole[-1]:,}" if whole else "there is no checkpoint yet"
            raise UserError(
                f"{self._label}{metrics.skipped_in_a_row} updates in a row were not finite; at step {step:,} "
                f"{measured}; {good}, and the batches are in {self.run.directory.skipped_file}. Look at them, or lower "
                "config.optimizer.factor, raise config.optimizer.warmup_steps or clip with config.optimizer.clip_norm, "
                "in a new --workdir"
            )

    def add_time(self, step: int, seconds: float) -> None:
        """Adds a step's time, tokens and FLOPs to the meter."""
        lengths = self.run.train.lengths(step - 1)
        model = self.programs.model.config
        tokens = sum(int(lengths[side].sum()) for side in kind_of(model).reads)
        flops = passes(self.run.config) * training_flops(model, *lengths.values())
        self.meter.add_time(seconds, tokens, flops)

    def seconds_left(self, step: int) -> float | None:
        """Returns the estimated seconds of what comes after `step`; None if not known yet.

        This is the steps, evaluations and regular checkpoints. Each is assumed to take as long as the last ones.
        """
        if not self._steps_per_second:
            return None
        config = self.run.config
        steps, every = config.steps, config.eval.every
        checkpoints = steps // config.checkpoint.every - step // config.checkpoint.every
        on_the_way = max(0, (steps - 1) // every - step // every) if every else 0
        evaluations = (on_the_way + len(self.programs.evaluators)) * self._runs_at_once
        waiting = evaluations * self._evaluation_seconds + checkpoints * self.saving_seconds
        return (steps - step) / self._steps_per_second + waiting

    def log(self, metrics: Metrics, step: int) -> None:
        """Writes the metrics since the last log and the gradient's norm at this step. Prints a summary."""
        metrics = jax.device_get(metrics)
        # The updates made before this step. If this step's update was skipped, `skipped` already counts it.
        updates = step - 1 - metrics.skipped + (metrics.skipped_in_a_row > 0)
        learning_rate = float(self.programs.schedule(updates))
        values = {"learning_rate": learning_rate, "grad_norm": metrics.grad_norm, "skipped": metrics.skipped}
        means, rates = self.meter.means(), self.meter.rates()
        if rates:
            devices = 1 if jax.default_backend() == "cpu" else self._parallel.num_devices  # CPU devices share all cores
            reached = self._runs_at_once * rates["flops_per_second"] / devices
            dtype = self.run.config.model.dtype
            rates["mfu"] = reached / measured_flops(dtype)
            if peak := data_sheet_flops(jax.local_devices()[0].device_kind, dtype):
                rates["mfu_data_sheet"] = reached / peak
        if self._runs_at_once > 1:
            rates["seeds_at_once"] = self._runs_at_once
        with self._writing():
            self._metrics.write(step, "train", {**means, **values, **rates})
        self.meter = Meter()
        shown = [f"lr {learning_rate:.2e}"]
        if "loss" in means:  # otherwise, all steps since the last log were skipped
            shown = [f"loss {means['loss']:.3f}", f"ppl {means['perplexity']:.2f}", *shown]
        if "mfu" in rates:
            self._steps_per_second = rates["steps_per_second"]
            sheet = f" ({rates['mfu_data_sheet']:.0%} of the data sheet's peak)" if "mfu_data_sheet" in rates else ""
            shown += [f"{rates['tokens_per_second']:,.0f} tokens/s", f"MFU {rates['mfu']:.0%}{sheet}"]
            shown += [f"{self._steps_per_second:.2f} steps/s", f"{duration(self.seconds_left(step) or 0)} left"]
        head = f"{self._label}step {step:>7,}/{self.run.config.steps:,}"
        self.progress.row(head, shown, cut=True)  # the bar also shows the time left

    def check_saving(self) -> None:
        """Checks whether the current checkpoint has failed, without waiting for it."""
        with self._writing():
            self.checkpoints.check()

    def save(self, state: TrainState, *, must: bool) -> None:
        """Starts writing a checkpoint of a state on the devices, once the previous checkpoint is written.

        With `must`, a failure ends the run, whatever config.on_write_failure says.
        """
        started = time.perf_counter()
        self._wait(must=False)
        self.start_saving(state, must=must)
        self.saving_seconds = time.perf_counter() - started

    def start_saving(self, state: TrainState, *, must: bool) -> None:
        """Starts writing a checkpoint of a state on the devices. For `must`, see `save`."""
        with self._writing(must=must):
            # checkpoints/ may exist even if the working directory was moved: Orbax creates it again while it writes.
            if not self.run.directory.is_in_place():
                raise moved(self.run.directory.path)
            self.checkpoints.save(state, self.meter.totals | {"seconds": self._metrics.seconds})

    def _wait(self, *, must: bool) -> None:
        """Waits until the last checkpoint is written, and only then deletes old checkpoints. For `must`, see `save`."""
        self.end_saving(must=must)
        self.prune(max(self.checkpoints.steps(), default=0))

    def end_saving(self, *, must: bool = False) -> None:
        """Waits until the last checkpoint is written. For `must`, see `save`."""
        with self._writing(must=must):
            self.checkpoints.wait()

    def prune(self, newest: int) -> None:
        """Deletes old checkpoints, up to the step `newest`. Keeps the best, unless evaluations score a mean."""
        if not self.run.directory.is_in_place():  # these may be the checkpoints of another run
            return
        of_one = self.run.config.eval.average == 1 or keeps_average(self.run.config)
        self.checkpoints.prune(newest, self._metrics.scores() if of_one else {})

    def require_saved(self, state: TrainState, step: int) -> None:
        """Waits until the checkpoint of a step is written. Writes it if config.on_write_failure ignored a failure."""
        self._wait(must=True)
        if step not in self.checkpoints.steps():
            self.save(state, must=True)
            self._wait(must=True)

    def out_of_patience(self, step: int) -> bool:
        """Returns whether the last config.eval.patience evaluations brought no better validation loss.

        If so, prints a message.
        """
        patience = self.run.config.eval.patience
        if not is_out_of_patience(self._metrics.written, patience):
            return False
        self.say(f"no better validation loss in {counted(patience, 'evaluation')}: the run ends at step {step:,}")
        return True

    def evaluate(self, state: TrainState, step: int, *, last: bool = False) -> dict[str, Evaluation]:
        """Evaluates the validation split or, after the last step, all splits. Writes and prints the results.

        An evaluation during training that is written already is not repeated; {} is returned. Raises Interrupted if the
        run was asked to end. A resumed run repeats this evaluation.
        """
        if not last and self._metrics.has(step, "valid"):
            return {}
        params, choice = self._evaluated_params(state, step, last)
        self.say(f"evaluating {choice}")

        def check(*, alone: bool) -> None:
            """Ends the run if it was asked to end; `alone`: the other processes are waiting for the first process."""
            if (stop_asked if alone else agreed_stop)(self.interruption.asked):
                # With "go on", the checkpoint of this step may have failed. Several processes allow only "stop".
                if self.run.config.on_write_failure != "stop":
                    self.require_saved(state, step)
                self.interruption.end(f"while evaluating step {step:,}, which is saved")

        settings = self.run.config.eval
        sentences = settings.final_sentences if last else settings.sentences
        splits = [*self.programs.evaluators] if last else ["valid"]
        evaluations = {}
        for split in splits:
            started = time.perf_counter()
            evaluations[split] = self.programs.evaluators[split](params, check=check, max_sentences=sentences)
            self._evaluation_seconds = time.perf_counter() - started
            self._write_evaluation(split, step, evaluations[split], len(choice.steps), final=last)
        self._show(splits[-1], evaluations[splits[-1]])
        return evaluations

    def _evaluated_params(self, state: TrainState, step: int, last: bool) -> tuple[Any, Choice]:
        """Returns the parameters to evaluate, and their checkpoints.

        Warns of missing checkpoints and, after the last step, of too few for the mean.
        """
        count = self.run.config.eval.final_average if last else self.run.config.eval.average
        if state.ema is not None:
            return state.ema, Choice([step], EMA)
        if count == 1:
            return state.params, Choice([step])
        self.end_saving()  # a failed write ends the run or is reported, as config.on_write_failure says
        averaged, choice = self.checkpoints.average(self._parallel.local(state.params), step, count, self.say)
        if warning := choice.warning(self.checkpoints.workdir, count if last else 1):
            self.say(f"WARNING: {warning}")
        return averaged, choice

    def _write_evaluation(self, split: str, step: int, evaluation: Evaluation, averaged: int, *, final: bool) -> None:
        """Prints an evaluation. Writes it, unless it is written already, perhaps with another config.decode.

        Each line of a final evaluation has "<split>/final": 1. It may be of other sentences and of the mean of more
        checkpoints than the evaluations during training, so it is not compared with them when the run is trained on.
        """
        if not self._metrics.has(step, split, final=final):
            with self._writing():
                if final or not self._metrics.has(step, split, final=True):
                    self.run.directory.save_outputs(self.programs.task.outputs, split, step, evaluation.outputs)
                values = {**evaluation.scalars, "averaged": averaged}
                self._metrics.write(step, split, values | {"final": 1} if final else values)
        else:
            self.say(f"metrics.jsonl and {self.programs.task.outputs}/ keep the earlier evaluation of this step:")
        first, *scalars = [f"{name} {value:.4g}" for name, value in evaluation.scalars.items()]
        self.progress.row(f"{self._label}step {step:>7,} {split}: {first}", scalars)

    def _show(self, split: str, evaluation: Evaluation) -> None:
        """Prints some sentences of a split, their outputs and their references."""
        count = len(evaluation.sources)
        self.say(f"some of {split}, with output > and reference =:")
        for i in np.linspace(0, count - 1, min(SAMPLES, count), dtype=int):
            shown = (" ", evaluation.sources[i]), (">", evaluation.outputs[i]), ("=", evaluation.references[i])
            for mark, text in shown:
                self.say(f"    {mark} {text[:LONGEST_SHOWN]}{' ...' if len(text) > LONGEST_SHOWN else ''}")

    def report(self, evaluations: dict[str, Evaluation], step: int) -> None:
        """Prints the scores of the last evaluation, by split, and where the run's files are."""
        task = self.programs.task
        compilations = {**self.programs.compilations, task.outputs: task.compilations}
        rows = [
            [name, *(f"{evaluation.scalars[name]:.4f}" for evaluation in evaluations.values())]
            for name in evaluations["valid"].scalars
        ]
        seed = f", {self._label.removesuffix(': ')}," if self._label else ""
        self.progress.table(f"{self.run.config.name}{seed} after {step:,} steps", ["", *evaluations], rows)
        few = self.run.config.eval.final_sentences
        path = self.run.directory.path
        quoted = shlex.quote(str(path))
        for name, text in {
            **({task.outputs: f"of at most the first {few:,} of each split"} if few else {}),
            **evaluations["valid"].signatures,
            "time": f"{duration(self._metrics.seconds)} since the run began",
            "compilations": ", ".join(f"{count} {name}" for name, count in compilations.items()),
            "everything": f"{path}/ (checkpoints, metrics.jsonl, {task.outputs}, ...)",
            "curves": f"tensorboard --logdir {quoted} (pip install tensorboard)",
            "use": f"python -m transformer_flax.{task.command} --workdir={quoted}",
        }.items():
            self.progress.say(f"{name + ':':<14}{text}")

"""Writes the files of a run: checkpoints, metrics, outputs and skipped batches."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from transformer_flax.console import Progress, counted, duration
from transformer_flax.errors import UserError
from transformer_flax.training.checkpoints import Checkpoints, moved
from transformer_flax.training.evaluation import Evaluation, Task
from transformer_flax.training.metrics import Meter, MetricsWriter, StepLines
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.setup import Data
from transformer_flax.training.step import Metrics, TrainState
from transformer_flax.training.wandb_run import WandbRun

SAMPLES = 3  # outputs printed at an evaluation
LONGEST_SHOWN = 400  # characters of each


class RunWriter:
    """The writer of one run's files, which also prints messages. A context manager: closes the files at its end.

    The directory must be claimed and locked. The run resumes from `step`: lines of later steps are removed from the
    files. `totals` are those saved with the checkpoint of `step`. Every message begins with `label`.
    """

    def __init__(
        self,
        config: ConfigDict,
        directory: RunDirectory,
        data: Data,
        task: Task,
        checkpoints: Checkpoints,
        progress: Progress,
        *,
        step: int = 0,
        totals: Any = None,
        label: str = "",
    ):
        self._config, self._directory, self._data, self._task = config, directory, data, task
        self._progress, self._label = progress, label
        self.checkpoints = checkpoints
        self.meter = Meter(totals)  # of the steps since the last log
        self._metrics = MetricsWriter(
            directory.metrics_file, step, score=task.score, send=lambda line: self._wandb.send(line)
        )
        self._skipped = StepLines(directory.skipped_file, step)
        if not step and self._metrics.dropped:  # killed before its first checkpoint, or its checkpoints are gone
            last = max(line["step"] for line in self._metrics.dropped)
            self.say(f"WARNING: the run begins anew; its metrics up to step {last:,} are dropped")
        self._wandb = WandbRun(config, directory, self.say)  # last, so that no later failure here leaves it open

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_) -> None:
        with contextlib.ExitStack() as closing:  # closes all three, even if one fails, for example on a full disk
            closing.callback(self._wandb.close, failed=failure is not None)
            closing.callback(self._skipped.close)
            closing.callback(self._metrics.close)

    def say(self, text: str) -> None:
        self._progress.say(f"{self._label}{text}")

    def row(self, head: str, parts: Sequence[str], *, cut: bool = False) -> None:
        self._progress.row(f"{self._label}{head}", parts, cut=cut)

    @contextlib.contextmanager
    def writing(self, *, must: bool = False) -> Iterator[None]:
        """Context manager for anything that writes.

        If config.on_write_failure is "stop", or with `must`, a failure ends the run. Otherwise it is only reported.
        """
        try:
            yield
        except UserError as error:
            if must or self._config.on_write_failure == "stop":
                raise
            self.say(f"WARNING: {error}; the run continues without it")

    def read(self, metrics: Metrics, step: int) -> None:
        """Adds the metrics of a step, on the host, to the meter. A skipped batch is reported and written instead.

        Ends the run if config.max_skipped updates in a row were not finite.
        """
        if not metrics.skipped_in_a_row:
            self.meter.add(metrics.sums, metrics.counts)
            return
        loss, grad_norm = f"{metrics.sums['loss'] / metrics.counts['loss']}", f"{metrics.grad_norm}"
        measured = f"the loss is {loss} and the norm of the gradient {grad_norm}"
        self.say(f"step {step:>7,}: {measured}: this update is skipped")
        pairs = self._data.train.pairs(step - 1)
        corpus = self._data.train.corpus_of(step - 1)
        with self.writing():
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
        if metrics.skipped_in_a_row >= self._config.max_skipped:
            whole = self.checkpoints.steps()
            good = f"the last good checkpoint is of step {whole[-1]:,}" if whole else "there is no checkpoint yet"
            raise UserError(
                f"{self._label}{metrics.skipped_in_a_row} updates in a row were not finite; at step {step:,} "
                f"{measured}; {good}, and the batches are in {self._directory.skipped_file}. Look at them, or lower "
                "config.optimizer.factor, raise config.optimizer.warmup_steps or clip with config.optimizer.clip_norm, "
                "in a new --workdir"
            )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes training values and the means since the last log. Resets the meter."""
        with self.writing():
            self._metrics.write(step, "train", {**self.meter.means(), **values})
        self.meter = Meter()

    def prune(self, newest: int) -> None:
        """Deletes old checkpoints, up to the step `newest`."""
        self.checkpoints.prune(newest, self._metrics.scores())

    def save(self, state: TrainState, *, must: bool = False) -> None:
        """Starts writing a checkpoint of a state, as returned by `Parallel.unreplicate`. For `must`, see `writing`."""
        with self.writing(must=must):
            # checkpoints/ may exist even if the working directory was moved: Orbax creates it again while it writes.
            if not self._directory.config_file.exists():
                raise moved(self._directory.path)
            self.checkpoints.save(state, self.meter.totals)

    def wait(self, *, must: bool = False) -> None:
        """Waits until the last checkpoint is written. For `must`, see `writing`."""
        with self.writing(must=must):
            self.checkpoints.wait()

    def write_evaluation(self, split: str, step: int, evaluation: Evaluation, averaged: int, *, final: bool) -> None:
        """Prints an evaluation. Writes it, unless it is written already, perhaps with another config.decode.

        Each line of a final evaluation has "<split>/final": 1. It may be of other sentences and of the mean of more
        checkpoints than the evaluations during training, so it is not compared with them when the run is trained on.
        """
        if not self._metrics.has(step, split, final=final):
            with self.writing():
                if final or not self._metrics.has(step, split, final=True):
                    self._directory.save_outputs(self._task.outputs, split, step, evaluation.outputs)
                values = {**evaluation.scalars, "averaged": averaged}
                self._metrics.write(step, split, values | {"final": 1} if final else values)
        first, *scalars = [f"{name} {value:.4g}" for name, value in evaluation.scalars.items()]
        self.row(f"step {step:>7,} {split}: {first}", scalars)

    def is_evaluated(self, step: int) -> bool:
        """Returns whether the evaluation of a step is written."""
        return self._metrics.has(step, "valid")

    def out_of_patience(self, step: int) -> bool:
        """Returns whether the last config.eval.patience evaluations brought no better validation loss.

        If so, prints a message.
        """
        losses, patience = self._metrics.validation_losses(), self._config.eval.patience
        if not 0 < patience < len(losses) or any(loss < min(losses[:-patience]) for loss in losses[-patience:]):
            return False
        self.say(f"no better validation loss in {counted(patience, 'evaluation')}: the run ends at step {step:,}")
        return True

    def show(self, split: str, evaluation: Evaluation) -> None:
        """Prints some sentences of a split, their outputs and their references."""
        count = len(evaluation.sources)
        self.say(f"some of {split}, with output > and reference =:")
        for i in np.linspace(0, count - 1, min(SAMPLES, count), dtype=int):
            shown = (" ", evaluation.sources[i]), (">", evaluation.outputs[i]), ("=", evaluation.references[i])
            for mark, text in shown:
                self.say(f"    {mark} {text[:LONGEST_SHOWN]}{' ...' if len(text) > LONGEST_SHOWN else ''}")

    def report(self, evaluations: dict[str, Evaluation], step: int, compilations: Mapping[str, int]) -> None:
        """Prints the scores of the last evaluation, by split, and where the run's files are."""
        columns = list(evaluations["valid"].scalars)
        rows = [
            [split, *(f"{evaluation.scalars[name]:.4f}" for name in columns)]
            for split, evaluation in evaluations.items()
        ]
        seed = f", {self._label.removesuffix(': ')}," if self._label else ""
        self._progress.table(f"{self._config.name}{seed} after {step:,} steps", ["split", *columns], rows)
        path = self._directory.path
        quoted = shlex.quote(str(path))
        for name, text in {
            **evaluations["valid"].signatures,
            "time": f"{duration(self._metrics.seconds)} since the run began",
            "compilations": ", ".join(f"{count} {name}" for name, count in compilations.items()),
            "everything": f"{path}/ (checkpoints, metrics.jsonl, {self._task.outputs}, ...)",
            "curves": f"tensorboard --logdir {quoted} (pip install tensorboard)",
            "use": f"python -m transformer_flax.{self._task.command} --workdir={quoted}",
        }.items():
            self._progress.say(f"{name + ':':<14}{text}")

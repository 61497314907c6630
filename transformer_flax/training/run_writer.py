"""What a run writes down as it learns: checkpoints, metrics, what it puts out, and what it was not taught."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from transformer_flax.console import Progress
from transformer_flax.errors import UserError
from transformer_flax.training.averaging import Choice, UnreadableError
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.evaluation import Evaluation
from transformer_flax.training.metrics import JsonLines, Meter, MetricsWriter
from transformer_flax.training.multihost import share
from transformer_flax.training.run_directory import Workdir
from transformer_flax.training.setup import Data
from transformer_flax.training.step import Metrics, TrainState
from transformer_flax.training.tasks import Task

SAMPLES = 3  # outputs shown at an evaluation


class Record:
    """A run's own: its config, its data in its order, and its directory.

    Args:
      config: of the run.
      workdir: claimed for it.
      data: as `prepare_data` gives them.
      progress: told what is written.
      label: goes before whatever is told, where there are several runs.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Workdir,
        data: Data,
        progress: Progress,
        *,
        label: str = "",
    ):
        self.config, self.workdir, self.data = config, workdir, data
        self._progress, self._label = progress, label
        self.meter = Meter()  # of the steps since the last log

    def say(self, text: str) -> None:
        self._progress.say(f"{self._label}{text}")

    def open(self, stack: contextlib.ExitStack, task: Task) -> None:
        """Keeps other processes from training here, as long as the stack lasts.

        Args:
          stack: that gives the directory free again.
          task: which names what is kept.

        Raises:
          UserError: another one does already.
        """
        self.task = task
        stack.enter_context(self.workdir.lock())
        self._scores: dict[int, float] = {}
        every, keep, seed = self.config.checkpoint.every, self.config.checkpoint.keep, self.config.seed
        self.checkpoints = Checkpoints(self.workdir.checkpoints, every=every, keep=keep, seed=seed, scores=self._scores)
        stack.callback(self.checkpoints.close)

    def begin(self, stack: contextlib.ExitStack, step: int, totals: Any = None) -> None:
        """Goes on from a step: what was written of later ones is cut off.

        Args:
          stack: that closes the files.
          step: whose checkpoint was restored; 0 without one.
          totals: that were saved with it.
        """
        self.meter = Meter(totals)
        self.writer = MetricsWriter(self.workdir.metrics_file, step, self._scores, score=self.task.score)
        stack.callback(self.writer.close)
        self._skipped = JsonLines(self.workdir.skipped_file, step)
        stack.callback(self._skipped.close)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which something is written; config.on_write_failure says whether a failure ends the run."""
        try:
            yield
        except UserError as error:
            if self.config.on_write_failure == "stop":
                raise
            self.say(f"WARNING: {error}; the run goes on without it")

    def read(self, metrics: Metrics, step: int) -> None:
        """Adds up the metrics of a step, which are on the host.

        Raises:
          UserError: too many updates in a row were not finite.
        """
        if not metrics.skipped_in_a_row:
            self.meter.add(metrics.sums, metrics.counts)
            return
        loss, grad_norm = f"{metrics.sums['loss']}", f"{metrics.grad_norm}"
        measured = f"the loss is {loss} and the norm of the gradient {grad_norm}"
        self.say(f"step {step:>7,}: {measured}: nothing is learned from this batch")
        pairs = self.data.train.pairs(step - 1)
        corpus = self.data.train.corpus
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
        if metrics.skipped_in_a_row >= self.config.max_skipped:
            whole = self.checkpoints.steps()
            good = f"the last good checkpoint is of step {whole[-1]:,}" if whole else "there is no checkpoint yet"
            raise UserError(
                f"{self._label}at step {step:,} {measured}, and so it was {metrics.skipped_in_a_row} times in a row; "
                f"{good}, and the batches are in {self.workdir.skipped_file}. Look at them, or lower "
                "config.optimizer.factor, raise config.optimizer.warmup_steps or clip with config.optimizer.clip_norm, "
                "in a new --workdir"
            )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes values of training, with what was measured since the last time, which begins anew."""
        with self.writing():
            self.writer.write(step, "train", {**self.meter.means(), **values})
        self.meter = Meter()

    def save(self, state: TrainState) -> None:
        """Starts writing a checkpoint of a state, as `Parallel.unreplicate` gives it.

        Raises:
          UserError: it, or the one before, cannot be written, or the run's directory is gone.
        """
        if (
            not self.workdir.config_file.exists()
        ):  # checkpoints/ alone may be there: Orbax makes it anew while it writes
            raise UserError(
                f"{self.workdir.path} has been moved or deleted, and the run cannot be saved; put it back, or start it "
                "in another --workdir"
            )
        self.checkpoints.save(state, self.meter.totals)

    def average(self, params: Any, step: int, count: int) -> tuple[Any, Choice]:
        """As `Checkpoints.average`, of what is left where a checkpoint is damaged, which is put aside; says so.

        Raises:
          UnreadableError: none can be read: a disk or a device in trouble is likelier than a damage.
        """
        while True:
            try:
                averaged, choice = self.checkpoints.average(params, step, count)
            except UnreadableError as error:
                if share()[1] > 1 or not self.checkpoints.can_read_another(error.step, params):
                    raise
                self.put_aside(error)
                continue
            if choice.missing:
                self.say(f"WARNING: {choice.warning(self.workdir.path)}")
            return averaged, choice

    def put_aside(self, error: UnreadableError) -> None:
        """Renames a damaged checkpoint, and says so."""
        aside = self.checkpoints.put_aside(error.step, "damaged")
        self.say(f"WARNING: {error}; it is put aside as {aside.name}")

    def keep(self, split: str, step: int, evaluation: Evaluation, averaged: int, *, final: bool) -> None:
        """Writes an evaluation, unless it was made before: then perhaps with another config.decode.

        The final evaluation of a run that ends before config.steps says that it is: there is another one of its step.
        """
        early = final and step < self.config.steps
        if not self.writer.has(step, split, final=early):
            with self.writing():
                self.workdir.save_outputs(self.task.outputs, split, step, evaluation.outputs)
                values = {**evaluation.scalars, "averaged": averaged}
                self.writer.write(step, split, values | {"final": 1} if early else values)
        scalars = "  ".join(f"{name} {value:.4g}" for name, value in evaluation.scalars.items())
        self.say(f"step {step:>7,} {split}: {scalars}")

    @property
    def out_of_patience(self) -> bool:
        """Whether the last config.eval.patience evaluations all had no better validation loss than one before them."""
        losses, patience = list(self.writer.validation_losses.values()), self.config.eval.patience
        if not 0 < patience < len(losses):
            return False
        best = min(losses[:-patience])
        return not any(loss < best for loss in losses[-patience:])

    def show(self, evaluation: Evaluation) -> None:
        """Some sentences, what is put out for them, and their references."""
        count = len(evaluation.sources)
        for i in np.linspace(0, count - 1, min(SAMPLES, count), dtype=int):
            shown = (" ", evaluation.sources[i]), (">", evaluation.outputs[i]), ("=", evaluation.references[i])
            for mark, text in shown:
                self.say(f"    {mark} {text}")

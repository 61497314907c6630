"""The training loop: everything that has an effect on the world."""

import collections
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.decoding.translator import Translator
from transformer_flax.errors import UserError
from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.cost import count_parameters, training_flops
from transformer_flax.model.transformer import Transformer, init_params
from transformer_flax.training.averaging import EMA, Choice, UnreadableError
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.distributed import agreed_stop, is_first, share
from transformer_flax.training.evaluation import Evaluation, Evaluator
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.loss import translation_loss
from transformer_flax.training.machine import keep_compiled, peak_flops
from transformer_flax.training.metrics import JsonLines, Meter, MetricsWriter
from transformer_flax.training.optimizer import make_optimizer, paper_schedule
from transformer_flax.training.parallel import Parallel, make_parallel
from transformer_flax.training.prefetch import prefetch
from transformer_flax.training.prepare import Data, check, model_config, prepare_data
from transformer_flax.training.progress import Progress, duration
from transformer_flax.training.step import Metrics, TrainState, init_key, make_eval_step, make_train_step
from transformer_flax.training.workdir import Workdir

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # read when the backend starts
SAMPLES = 3  # translations shown at an evaluation
PROFILED = slice(20, 25)  # steps of a session, when most shapes have been compiled


def train(config: ConfigDict, workdir: str | os.PathLike, *, profile: bool = False) -> dict[str, Evaluation]:
    """Trains `config` in a working directory, from its latest checkpoint if there is one.

    Args:
      config: of the run.
      workdir: where it lies.
      profile: record what the machine does in some steps, for TensorBoard or Perfetto.

    Returns:
      The last evaluation of each split.

    Raises:
      UserError: about the config, the data or the directory, before any long work starts; or a loss or gradient that is
        not finite, or a disk that is full.
    """
    check(config)
    if config.deterministic and DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    compiled = keep_compiled(config.data.cache_dir)
    with Progress(quiet=not is_first()) as progress:
        rows, parts = config.data.rows_multiple_of, (config.accumulation_steps, config.loss_chunks)
        parallel = make_parallel(config.parallel, rows, *parts)
        kind = jax.devices()[0].device_kind
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        progress.say(
            f"{config.name}: {_describe(model_config(config, config.data.vocab_size))}\n"
            f"on {parallel.num_devices} x {kind}{processes}, {config.parallel.mode}, {config.model.dtype}; "
            f"compiled programs are kept in {compiled}"
        )
        place = Workdir(workdir)
        data = prepare_data(config, place, progress)
        return Trainer(config, place, data, parallel, progress, profile=profile and is_first()).run()


def _describe(model: TransformerConfig) -> str:
    parts = count_parameters(model)
    return (
        f"{sum(parts.values()):,} parameters with a vocabulary of {model.vocab_size:,}, "
        f"{sum(parts.values()) - parts['embeddings']:,} without"
    )


class Trainer:
    """A run: its programs, its state and its loop."""

    def __init__(
        self,
        config: ConfigDict,
        workdir: Workdir,
        data: Data,
        parallel: Parallel,
        progress: Progress,
        *,
        profile: bool = False,
    ):
        self._profile = profile
        self._config, self._workdir, self._data = config, workdir, data
        self._parallel, self._progress = parallel, progress
        self._compilations: collections.Counter[str] = collections.Counter()

        self._model = model = Transformer(model_config(config, data.tokenizer.vocab_size))
        optimizer = make_optimizer(config.optimizer, config.model.d_model)
        self._schedule = paper_schedule(config.model.d_model, config.optimizer.warmup_steps, config.optimizer.factor)
        loss_fn = parallel.gathering(translation_loss(model, config.label_smoothing, config.loss_chunks))
        axis_name = parallel.axis_name
        train_step = make_train_step(
            loss_fn,
            optimizer,
            accumulation_steps=config.accumulation_steps,
            ema_decay=config.ema_decay,
            axis_name=axis_name,
        )
        eval_step = make_eval_step(loss_fn, axis_name=axis_name)
        self._train_step = parallel.compile(self._counted("training", train_step), donate_state=True)
        self._eval_step = parallel.compile(self._counted("evaluation", eval_step))
        self._init = lambda: TrainState.create(
            config.seed, init_params(model.config, init_key(config.seed)), optimizer, keep_ema=config.ema_decay > 0
        )
        self._translator = Translator([model], None, data.tokenizer, **config.decode)
        self._evaluators = {
            split: Evaluator(
                split,
                data.pairs[split],
                data.corpora[split],
                config,
                eval_step=self._eval_step,
                parallel=parallel,
                translator=self._translator,
                progress=progress,
            )
            for split in data.pairs
        }

    def _counted(self, name: str, function: Callable) -> Callable:
        def traced(*args):
            self._compilations[name] += 1  # runs while tracing only, which is once for every shape
            return function(*args)

        return traced

    def run(self) -> dict[str, Evaluation]:
        """Trains to the last step, and evaluates every split with the parameters it ends with.

        Raises:
          Interrupted: a signal asked for an end; nothing that was done is lost.
        """
        last = self._config.steps
        with contextlib.ExitStack() as stack:
            self._interruption = stack.enter_context(Interruption())
            stack.enter_context(self._workdir.lock())
            scores: dict[int, float] = {}
            every, keep = self._config.checkpoint.every, self._config.checkpoint.keep
            self._checkpoints = Checkpoints(self._workdir.checkpoints, every=every, keep=keep, scores=scores)
            stack.callback(self._checkpoints.close)
            state, start, meter = self._restore()
            self._writer = MetricsWriter(self._workdir.metrics_file, start, scores)
            stack.callback(self._writer.close)
            self._skipped = JsonLines(self._workdir.skipped_file, start)
            stack.callback(self._skipped.close)
            if start < last:
                if self._is_evaluated_after(start) and not self._writer.has(start, "valid"):  # it was interrupted
                    self._evaluate(state)
                state = self._train(state, start, meter)
            else:
                self._progress.say(f"the run has ended at step {start:,} already; for more: --config.steps=N")
            evaluations = self._evaluate(state, last=True)
            self._report(evaluations)
            return evaluations

    def _restore(self) -> tuple[TrainState, int, Meter]:
        """The state to go on from, on all devices, its step, and what was measured but not logged."""
        like = jax.eval_shape(self._init)
        self._checkpoints.require_room(like)
        unreadable: dict[int, UnreadableError] = {}
        for step in reversed(self._checkpoints.steps()):
            try:
                state, totals = self._checkpoints.restore(like, step)
            except UnreadableError as error:
                if share()[1] > 1:  # which may not all find it so
                    raise
                unreadable[step] = error
                continue
            for damaged, error in unreadable.items():  # the disk and the device can read: another one was
                aside = self._checkpoints.put_aside(damaged)
                self._progress.say(f"WARNING: {error}; it is put aside as {aside.name}")
            self._progress.say(f"resuming from step {step:,} in {self._workdir.path}")
            return self._parallel.place(state), step, Meter(totals)
        if unreadable:  # a disk or a device in trouble is likelier than as many damages
            newest = next(iter(unreadable.values()))
            raise UserError(
                f"{newest}; no checkpoint can be read, and nothing was changed: run the same command when the cause is "
                f"mended, or choose another --workdir. The cause: {newest.__cause__}"
            )
        return self._parallel.place(self._init()), 0, Meter()

    def _is_evaluated_after(self, step: int) -> bool:
        every = self._config.eval.every
        return every > 0 and step > 0 and step % every == 0 and step != self._config.steps

    def _train(self, state: TrainState, start: int, meter: Meter) -> TrainState:
        """Makes the steps from `start` to the last, whose state it saves and returns."""
        config = self._config
        wait = jax.default_backend() == "cpu"  # where a sharded step that overtakes another one deadlocks
        unread: Metrics | None = None  # of the step before, read while the device works on the next
        steps = range(start + 1, config.steps + 1)
        profiled = steps[PROFILED] if self._profile else range(0)
        batches = prefetch(lambda step: self._parallel.shard(self._data.train[step - 1]), steps)
        with (
            self._progress.bar("training", start) as update,
            contextlib.closing(batches),
            contextlib.ExitStack() as trace,
        ):
            for step in steps:
                if step == profiled.start:
                    trace.enter_context(jax.profiler.trace(str(self._workdir.profile)))
                started, compilations = time.perf_counter(), self._compilations.total()
                state, metrics = self._train_step(state, next(batches))
                if wait:
                    jax.block_until_ready(state)
                if unread is not None:
                    self._read(unread, step - 1, meter)
                unread = metrics

                last, interrupted = step == config.steps, agreed_stop(step, self._interruption.signal is not None)
                log = last or step % config.log.every == 0
                evaluate = self._is_evaluated_after(step)
                save = last or evaluate or interrupted or step % config.checkpoint.every == 0
                if log or save:  # what is logged or saved is of this step too
                    self._read(metrics, step, meter)
                    unread = None
                if compilations == self._compilations.total():
                    lengths = self._data.train.lengths(step - 1)
                    seconds, tokens = time.perf_counter() - started, sum(int(side.sum()) for side in lengths.values())
                    meter.add_time(seconds, tokens, training_flops(self._model.config, *lengths.values()))
                update(step, config.steps)
                if step in profiled and step + 1 not in profiled:
                    jax.block_until_ready(state)
                    trace.close()
                    self._progress.say(f"profile of steps {profiled.start:,} to {step:,}: {self._workdir.profile}")

                if log:
                    update(step, config.steps, note=self._log(step, meter, metrics))
                    meter = Meter()
                with self._writing():
                    self._checkpoints.check()
                if save:
                    with contextlib.nullcontext() if interrupted or last else self._writing():
                        self._checkpoints.save(self._parallel.unreplicate(state), meter.totals)
                if interrupted and not last:
                    self._checkpoints.wait()
                    self._interruption.signal = self._interruption.signal or signal.SIGTERM  # another was asked
                    self._interruption.check(f"after step {step:,}, which is saved")
                if evaluate:
                    self._evaluate(state)
        self._checkpoints.wait()
        return state

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A context in which something is written; config.on_write_failure says whether a failure ends the run."""
        try:
            yield
        except UserError as error:
            if self._config.on_write_failure == "stop":
                raise
            self._progress.say(f"WARNING: {error}; the run goes on without it")

    def _read(self, metrics: Metrics, step: int, meter: Meter) -> None:
        """Waits for the metrics of a step and adds them up.

        Raises:
          UserError: too many updates in a row were not finite.
        """
        metrics = self._parallel.unreplicate(jax.device_get(metrics))
        if not metrics.skipped_in_a_row:
            meter.add(metrics.sums, metrics.counts)
            return
        loss, grad_norm = f"{metrics.sums['loss']}", f"{metrics.grad_norm}"
        measured = f"the loss is {loss} and the norm of the gradient {grad_norm}"
        self._progress.say(f"step {step:>7,}: {measured}: nothing is learned from this batch")
        pairs = self._data.train.pairs(step - 1)
        corpus = self._data.train.corpus
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
        if metrics.skipped_in_a_row >= self._config.max_skipped:
            whole = self._checkpoints.steps()
            good = f"the last good checkpoint is of step {whole[-1]:,}" if whole else "there is no checkpoint yet"
            raise UserError(
                f"at step {step:,} {measured}, and so it was {metrics.skipped_in_a_row} times in a row; {good}, and "
                f"the batches are in {self._workdir.skipped_file}. Look at them, or lower config.optimizer.factor, "
                "raise config.optimizer.warmup_steps or clip with config.optimizer.clip_norm, in a new --workdir"
            )

    def _log(self, step: int, meter: Meter, metrics: Metrics) -> str:
        """Writes what was measured since the last time, and the gradient of this step; returns it in short."""
        metrics = self._parallel.unreplicate(jax.device_get(metrics))
        updates = step - 1 - metrics.skipped + (metrics.skipped_in_a_row > 0)  # made before this one
        learning_rate = float(self._schedule(updates))
        now = {"learning_rate": learning_rate, "grad_norm": float(metrics.grad_norm), "skipped": int(metrics.skipped)}
        values = {**meter.means(), **now, **meter.rates()}
        if "flops_per_second" in values:
            devices = 1 if jax.default_backend() == "cpu" else self._parallel.num_devices  # which share all cores
            values["mfu"] = values["flops_per_second"] / (devices * peak_flops(self._config.model.dtype))
        with self._writing():
            self._writer.write(step, "train", values)
        note = f"lr {learning_rate:.2e}"
        if "loss" in values:  # else all since the last time were skipped
            note = f"loss {values['loss']:.3f}  ppl {values['perplexity']:.2f}  {note}"
        left = ""
        if "steps_per_second" in values:
            note += f"  {values['steps_per_second']:.2f} steps/s  {values['tokens_per_second']:,.0f} tokens/s"
            note += f"  MFU {values['mfu']:.0%}"
            left = f"  {duration((self._config.steps - step) / values['steps_per_second'])} left"
        self._progress.say(f"step {step:>7,}/{self._config.steps:,}  {note}{left}")
        return note

    def _evaluate(self, state: TrainState, *, last: bool = False) -> dict[str, Evaluation]:
        """Evaluates the validation split, and all splits after the last step; shows and keeps the translations.

        Raises:
          Interrupted: it is done anew when the run goes on.
        """
        config = self._config.eval
        step = int(np.ravel(state.step)[0])
        average = config.final_average if last else config.average
        if state.ema is not None:
            params, choice = self._parallel.unreplicate(state.ema), Choice([step], EMA)
        elif average > 1:
            with self._writing():
                self._checkpoints.wait()  # the newest may still be on its way to the disk
            params, choice = self._checkpoints.average(self._parallel.local(state.params), step, average)
        else:
            params, choice = self._parallel.unreplicate(state.params), Choice([step])
        self._progress.say(f"evaluating {choice}")
        evaluations = {}
        for split, evaluator in self._evaluators.items():
            if split == "valid" or last:
                evaluation = evaluator(
                    params,
                    max_sentences=0 if last else config.sentences,
                    check=lambda: self._check(f"while evaluating step {step:,}, which is saved"),
                )
                evaluations[split] = evaluation
                name = str(step) if split == "valid" else f"{step}.{split}"
                if not self._writer.has(
                    step, split
                ):  # else it was evaluated before, perhaps with another config.decode
                    with self._writing():
                        self._workdir.save_translations(name, evaluation.translations)
                        self._writer.write(step, split, {**evaluation.scalars, "averaged": len(choice.steps)})
                scalars = "  ".join(f"{name} {value:.4g}" for name, value in evaluation.scalars.items())
                self._progress.say(f"step {step:>7,} {split}: {scalars}")
        shown = evaluations["valid"]
        for i in np.linspace(0, len(shown.sources) - 1, min(SAMPLES, len(shown.sources)), dtype=int):
            for mark, text in ((" ", shown.sources[i]), (">", shown.translations[i]), ("=", shown.references[i])):
                self._progress.say(f"    {mark} {text}")
        return evaluations

    def _check(self, where: str) -> None:
        """Ends the run if it was asked to, except where several processes would not end together: they do after a step.

        Raises:
          Interrupted: it was.
        """
        if share()[1] == 1:
            self._interruption.check(where)

    def _report(self, evaluations: dict[str, Evaluation]) -> None:
        columns = list(evaluations["valid"].scalars)
        rows = [
            [split, *(f"{evaluation.scalars[name]:.4f}" for name in columns)]
            for split, evaluation in evaluations.items()
        ]
        self._progress.table(f"{self._config.name} after {self._config.steps:,} steps", ["split", *columns], rows)
        counts = {**self._compilations, "translation": self._translator.compilations}
        for label, text in {
            "BLEU": evaluations["valid"].signature,
            "time": f"{duration(self._writer.seconds)} since the run began",
            "compilations": ", ".join(f"{count} {name}" for name, count in counts.items()),
            "everything": f"{self._workdir.path}/ (config, tokenizer, checkpoints, metrics.jsonl, translations)",
            "curves": f"tensorboard --logdir {self._workdir.path} (pip install tensorboard)",
        }.items():
            self._progress.say(f"{label + ':':<14}{text}")

"""The training loop: everything that has an effect on the world."""

import collections
import contextlib
import os
import time
from collections.abc import Callable

import jax
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.decoding.translator import Translator
from transformer_flax.errors import UserError
from transformer_flax.model.config import TransformerConfig
from transformer_flax.model.cost import count_parameters
from transformer_flax.model.transformer import Transformer, init_params
from transformer_flax.training.averaging import EMA, Choice
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.evaluation import Evaluation, Evaluator
from transformer_flax.training.loss import translation_loss
from transformer_flax.training.metrics import Meter, MetricsWriter
from transformer_flax.training.optimizer import make_optimizer, paper_schedule
from transformer_flax.training.parallel import Parallel, make_parallel
from transformer_flax.training.prefetch import prefetch
from transformer_flax.training.prepare import Data, check, model_config, prepare_data
from transformer_flax.training.progress import Progress, duration
from transformer_flax.training.step import Metrics, TrainState, init_key, make_eval_step, make_train_step
from transformer_flax.training.workdir import Workdir

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # read when the backend starts
SAMPLES = 3  # translations shown at an evaluation


def train(config: ConfigDict, workdir: str | os.PathLike) -> dict[str, Evaluation]:
    """Trains `config` in a working directory, from its latest checkpoint if there is one.

    Returns:
      The last evaluation of each split.

    Raises:
      UserError: about the config, the data or the directory, before any long work starts; or a loss or gradient that is
        not finite, or a disk that is full.
    """
    check(config)
    if config.deterministic and DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    with Progress() as progress:
        parallel = make_parallel(config.parallel, config.data.rows_multiple_of, config.accumulation_steps)
        kind = jax.devices()[0].device_kind
        progress.say(
            f"{config.name}: {_describe(model_config(config, config.data.vocab_size))}\n"
            f"on {parallel.num_devices} x {kind}, {config.parallel.mode}, {config.model.dtype}"
        )
        place = Workdir(workdir)
        data = prepare_data(config, place, progress)
        return Trainer(config, place, data, parallel, progress).run()


def _describe(model: TransformerConfig) -> str:
    parts = count_parameters(model)
    return (
        f"{sum(parts.values()):,} parameters with a vocabulary of {model.vocab_size:,}, "
        f"{sum(parts.values()) - parts['embeddings']:,} without"
    )


class Trainer:
    """A run: its programs, its state and its loop."""

    def __init__(self, config: ConfigDict, workdir: Workdir, data: Data, parallel: Parallel, progress: Progress):
        self._config, self._workdir, self._data = config, workdir, data
        self._parallel, self._progress = parallel, progress
        self._compilations: collections.Counter[str] = collections.Counter()

        model = Transformer(model_config(config, data.tokenizer.vocab_size))
        optimizer = make_optimizer(config.optimizer, config.model.d_model)
        self._schedule = paper_schedule(config.model.d_model, config.optimizer.warmup_steps, config.optimizer.factor)
        loss_fn = translation_loss(model, config.label_smoothing)
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
        self._checkpoints = Checkpoints(workdir.checkpoints, every=config.checkpoint.every, keep=config.checkpoint.keep)
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
            if split != "train"
        }

    def _counted(self, name: str, function: Callable) -> Callable:
        def traced(*args):
            self._compilations[name] += 1  # runs while tracing only, which is once for every shape
            return function(*args)

        return traced

    def run(self) -> dict[str, Evaluation]:
        """Trains to the last step, and evaluates every split with the parameters it ends with."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._checkpoints.close)
            state, start = self._restore()
            self._writer = MetricsWriter(self._workdir.metrics_file, start)
            stack.callback(self._writer.close)
            if start < self._config.steps:
                state = self._train(state, start)
            else:
                self._progress.say(f"the run has ended at step {start:,} already; for more: --config.steps=N")
            evaluations = self._evaluate(state, last=True, record=start < self._config.steps)
            self._report(evaluations)
            return evaluations

    def _restore(self) -> tuple[TrainState, int]:
        """The state to go on from, on all devices, and its step."""
        steps = self._checkpoints.steps()
        like = jax.eval_shape(self._init)
        self._checkpoints.require_room(like)
        if not steps:
            return self._parallel.replicate(self._init()), 0
        self._progress.say(f"resuming from step {steps[-1]:,} in {self._workdir.path}")
        return self._parallel.replicate(self._checkpoints.restore(like, steps[-1])), steps[-1]

    def _train(self, state: TrainState, start: int) -> TrainState:
        """Makes the steps from `start` to the last, whose state it saves and returns."""
        config = self._config
        wait = jax.default_backend() == "cpu"  # where a sharded step that overtakes another one deadlocks
        meter = Meter()
        unread: Metrics | None = None  # of the step before, read while the device works on the next
        steps = range(start + 1, config.steps + 1)
        batches = prefetch(lambda step: self._parallel.shard(self._data.train[step - 1]), steps)
        with self._progress.bar("training", start) as update, contextlib.closing(batches):
            for step in steps:
                last = step == config.steps
                log = last or step % config.log.every == 0
                evaluate = not last and config.eval.every > 0 and step % config.eval.every == 0
                save = last or evaluate or step % config.checkpoint.every == 0

                started, compilations = time.perf_counter(), self._compilations.total()
                state, metrics = self._train_step(state, next(batches))
                if wait:
                    jax.block_until_ready(state)
                if unread is not None:
                    self._read(unread, step - 1, meter)
                unread = metrics
                if log or save:  # nothing that is not finite is logged or saved
                    self._read(metrics, step, meter)
                    unread = None
                if compilations == self._compilations.total():
                    meter.add_time(time.perf_counter() - started, self._data.train.num_tokens(step - 1))
                update(step, config.steps)

                if log:
                    update(step, config.steps, note=self._log(step, meter, metrics))
                    meter = Meter()
                bleu = None
                if evaluate:
                    scalars = self._evaluate(state)["valid"].scalars
                    if config.eval.average == 1 or config.ema_decay:  # else it is not of what is saved now
                        bleu = scalars["bleu"]
                if save:
                    self._checkpoints.save(self._parallel.unreplicate(state), bleu)
        return state

    def _read(self, metrics: Metrics, step: int, meter: Meter) -> None:
        """Waits for the metrics of a step and adds them up.

        Raises:
          UserError: they are not finite.
        """
        metrics = self._parallel.unreplicate(jax.device_get(metrics))
        loss, grad_norm = float(metrics.sums["loss"]), float(metrics.grad_norm)
        if not np.isfinite(loss + grad_norm):
            raise UserError(
                f"at step {step:,} the loss is {loss} and the norm of the gradient {grad_norm}; no checkpoint has it. "
                "Lower config.optimizer.factor, raise config.optimizer.warmup_steps or clip with "
                "config.optimizer.clip_norm, in a new --workdir"
            )
        meter.add(metrics.sums, metrics.counts)

    def _log(self, step: int, meter: Meter, metrics: Metrics) -> str:
        """Writes what was measured since the last time, and the gradient of this step; returns it in short."""
        grad_norm = float(self._parallel.unreplicate(metrics.grad_norm))
        learning_rate = float(self._schedule(step - 1))
        values = {**meter.means(), "learning_rate": learning_rate, "grad_norm": grad_norm, **meter.rates()}
        self._writer.write(step, "train", values)
        note = f"loss {values['loss']:.3f}  ppl {values['perplexity']:.2f}  lr {learning_rate:.2e}"
        left = ""
        if "steps_per_second" in values:
            note += f"  {values['steps_per_second']:.2f} steps/s  {values['tokens_per_second']:,.0f} tokens/s"
            left = f"  {duration((self._config.steps - step) / values['steps_per_second'])} left"
        self._progress.say(f"step {step:>7,}/{self._config.steps:,}  {note}{left}")
        return note

    def _evaluate(self, state: TrainState, *, last: bool = False, record: bool = True) -> dict[str, Evaluation]:
        """Evaluates the validation split, and all splits after the last step; shows and keeps the translations."""
        config = self._config.eval
        step = int(np.ravel(state.step)[0])
        average = config.final_average if last else config.average
        if state.ema is not None:
            params, choice = self._parallel.unreplicate(state.ema), Choice([step], EMA)
        elif average > 1:
            params, choice = self._checkpoints.average(self._parallel.unreplicate(state.params), step, average)
        else:
            params, choice = self._parallel.unreplicate(state.params), Choice([step])
        self._progress.say(f"evaluating {choice}")
        evaluations = {}
        for split, evaluator in self._evaluators.items():
            if split == "valid" or last:
                evaluation = evaluator(params, max_sentences=0 if last else config.sentences)
                evaluations[split] = evaluation
                if record:
                    self._writer.write(step, split, evaluation.scalars)
                name = str(step) if split == "valid" else f"{step}.{split}"
                self._workdir.save_translations(name, evaluation.translations)
                scalars = "  ".join(f"{name} {value:.4g}" for name, value in evaluation.scalars.items())
                self._progress.say(f"step {step:>7,} {split}: {scalars}")
        shown = evaluations["valid"]
        for i in np.linspace(0, len(shown.sources) - 1, min(SAMPLES, len(shown.sources)), dtype=int):
            for mark, text in ((" ", shown.sources[i]), (">", shown.translations[i]), ("=", shown.references[i])):
                self._progress.say(f"    {mark} {text}")
        return evaluations

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

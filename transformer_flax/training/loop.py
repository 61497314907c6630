"""The training loop: everything that has an effect on the world."""

import collections
import os
import time
from collections.abc import Callable

import jax
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.decoding.translator import Translator
from transformer_flax.errors import UserError
from transformer_flax.model.cost import count_parameters
from transformer_flax.model.transformer import Transformer, init_params
from transformer_flax.special_tokens import PAD_ID
from transformer_flax.training.checkpoints import Checkpoints
from transformer_flax.training.evaluation import Evaluation, Evaluator
from transformer_flax.training.loss import translation_loss
from transformer_flax.training.metrics import Meter, MetricsWriter
from transformer_flax.training.optimizer import make_optimizer, paper_schedule
from transformer_flax.training.parallel import Parallel, make_parallel
from transformer_flax.training.prepare import Data, check, model_config, prepare_data
from transformer_flax.training.progress import Progress, duration
from transformer_flax.training.step import Metrics, TrainState, init_key, make_eval_step, make_train_step
from transformer_flax.training.workdir import Workdir

SAMPLES = 3  # translations shown at an evaluation


def train(config: ConfigDict, workdir: str | os.PathLike) -> dict[str, Evaluation]:
    """Trains `config` in a working directory, from its latest checkpoint if there is one.

    Returns:
      The last evaluation of each split.

    Raises:
      UserError: about the config, the data or the directory, before any long work starts; or a loss that is not finite.
    """
    check(config)
    if config.deterministic:  # read when the backend starts, which is below
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    with Progress() as progress:
        parts = count_parameters(model_config(config, config.data.vocab_size))
        embeddings = parts["embeddings"]
        progress.say(
            f"{config.name}: {sum(parts.values()) - embeddings:,} parameters, and {embeddings:,} in embeddings of a "
            f"vocabulary of {config.data.vocab_size:,}"
        )
        parallel = make_parallel(config.parallel, config.data.rows_multiple_of, config.accumulation_steps)
        kind = jax.devices()[0].device_kind
        progress.say(f"{parallel.num_devices} x {kind}, {config.parallel.mode}, {config.model.dtype}")
        home = Workdir(workdir)
        data = prepare_data(config, home, progress)
        return Trainer(config, home, data, parallel, progress).run()


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
            loss_fn, optimizer, accumulation_steps=config.accumulation_steps, axis_name=axis_name
        )
        eval_step = make_eval_step(loss_fn, axis_name=axis_name)
        self._train_step = parallel.compile(self._counted("training", train_step), donate_state=True)
        self._eval_step = parallel.compile(self._counted("evaluation", eval_step))

        self._fresh = TrainState.create(config.seed, init_params(model.config, init_key(config.seed)), optimizer)
        self._checkpoints = Checkpoints(workdir.checkpoints, config.checkpoint.keep)
        self._checkpoints.require_room(self._fresh)
        self._translator = Translator(model, self._fresh.params, data.tokenizer, **config.decode)
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
        config = self._config
        state, start = self._restore()
        self._writer = MetricsWriter(self._workdir.metrics_file, start)
        meter = Meter()
        unread: Metrics | None = None  # of the step before, read while the device works on the next
        wait = jax.default_backend() == "cpu"  # where a sharded step that overtakes another one deadlocks
        evaluations: dict[str, Evaluation] = {}
        with self._progress.bar("training", start) as update:
            for step in range(start + 1, config.steps + 1):
                last = step == config.steps
                started, compilations = time.perf_counter(), self._compilations.total()
                batch = self._data.train[step - 1]
                state, metrics = self._train_step(state, self._parallel.shard(batch))
                if wait:
                    jax.block_until_ready(state)
                if unread is not None:
                    self._read(unread, step - 1, meter)
                unread = metrics
                if compilations == self._compilations.total():
                    meter.add_time(time.perf_counter() - started, sum(np.sum(x != PAD_ID) for x in batch.values()))
                update(step, config.steps)

                if last or step % config.log.every == 0:
                    self._log(step, meter, self._read(metrics, step, meter))
                    unread, meter = None, Meter()
                evaluate = last or (config.eval.every and step % config.eval.every == 0)
                if evaluate:
                    evaluations = self._evaluate(step, state, last)
                    for split, evaluation in evaluations.items():
                        self._writer.write(step, split, evaluation.scalars)
                if last or step % config.checkpoint.every == 0:
                    bleu = evaluations["valid"].scalars["bleu"] if evaluate else None
                    self._checkpoints.save(self._parallel.unreplicate(state), bleu)
        if not evaluations:
            self._progress.say(f"the run has ended at step {start:,} already; for more: --config.steps=N")
            evaluations = self._evaluate(start, state, last=True)
        self._checkpoints.close()
        self._writer.close()
        self._report(evaluations)
        return evaluations

    def _restore(self) -> tuple[TrainState, int]:
        """The state to go on from, on all devices, and its step."""
        steps = self._checkpoints.steps()
        if not steps:
            return self._parallel.replicate(self._fresh), 0
        step = steps[-1]
        if step > self._config.steps:
            raise UserError(
                f"{self._workdir.path} is at step {step:,} already, past config.steps={self._config.steps:,}"
            )
        self._progress.say(f"resuming from step {step:,} in {self._workdir.path}")
        return self._parallel.replicate(self._checkpoints.restore(self._fresh, step)), step

    def _read(self, metrics: Metrics, step: int, meter: Meter) -> Metrics:
        """Waits for the metrics of a step, adds them up and returns them."""
        metrics = self._parallel.unreplicate(jax.device_get(metrics))
        if not np.isfinite(metrics.sums["loss"]):
            raise UserError(
                f"the loss of step {step:,} is {metrics.sums['loss']}; the last checkpoint is good. Lower "
                "config.optimizer.factor, raise config.optimizer.warmup_steps, or clip with config.optimizer.clip_norm"
            )
        meter.add(metrics.sums, metrics.counts)
        return metrics

    def _log(self, step: int, meter: Meter, metrics: Metrics) -> None:
        steps = self._config.steps
        learning_rate = float(self._schedule(step - 1))
        values = {
            **meter.means(),
            "learning_rate": learning_rate,
            "grad_norm": float(metrics.grad_norm),
            **meter.rates(),
        }
        self._writer.write(step, "train", values)
        line = (
            f"step {step:>7,}/{steps:,}  loss {values['loss']:.3f}  ppl {values['perplexity']:.2f}  "
            f"lr {learning_rate:.2e}"
        )
        if "steps_per_second" in values:
            left = (steps - step) / values["steps_per_second"]
            line += (
                f"  {values['steps_per_second']:.2f} steps/s  {values['tokens_per_second']:,.0f} tokens/s  "
                f"{duration(left)} left"
            )
        self._progress.say(line)

    def _evaluate(self, step: int, state: TrainState, last: bool) -> dict[str, Evaluation]:
        """Evaluates the validation split, and all splits after the last step; shows and keeps the translations."""
        config = self._config.eval
        params = self._parallel.unreplicate(state).params
        earlier = self._steps_to_average(step, config.final_average if last else config.average)
        if earlier:
            taken = ", ".join(f"{s:,}" for s in [*earlier, step])
            self._progress.say(f"evaluating the average of the parameters at steps {taken}")
            params = self._checkpoints.average(self._fresh, earlier, params)
        evaluations = {}
        for split, evaluator in self._evaluators.items():
            if split == "valid" or last:
                evaluation = evaluator(params, max_sentences=0 if last else config.sentences)
                evaluations[split] = evaluation
                name = str(step) if split == "valid" else f"{step}.{split}"
                self._workdir.save_translations(name, evaluation.translations)
                scalars = "  ".join(f"{name} {value:.4g}" for name, value in evaluation.scalars.items())
                self._progress.say(f"step {step:>7,} {split}: {scalars}")
        shown = evaluations["valid"]
        for i in np.linspace(0, len(shown.sources) - 1, min(SAMPLES, len(shown.sources)), dtype=int):
            for mark, text in ((" ", shown.sources[i]), (">", shown.translations[i]), ("=", shown.references[i])):
                self._progress.say(f"    {mark} {text}")
        return evaluations

    def _steps_to_average(self, step: int, average: int) -> list[int]:
        """The last checkpoints before `step` that make `average` with it; regular ones, written at the interval."""
        regular = [s for s in self._checkpoints.steps() if s < step and s % self._config.checkpoint.every == 0]
        return regular[-(average - 1) :] if average > 1 else []

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
            "curves": f"tensorboard --logdir {self._workdir.path}",
        }.items():
            self._progress.say(f"{label + ':':<14}{text}")

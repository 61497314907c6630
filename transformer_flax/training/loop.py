"""The training loop: everything that has an effect on the world."""

import collections
import contextlib
import functools
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.console import Progress, counted, duration
from transformer_flax.model.config import ModelConfig
from transformer_flax.model.flops import count_parameters, training_flops
from transformer_flax.model.registry import init_params, kind_of, make_model
from transformer_flax.training.averaging import EMA, Choice
from transformer_flax.training.compilation_cache import keep_compiled, peak_flops
from transformer_flax.training.evaluation import Evaluation, Evaluator
from transformer_flax.training.fields import complete
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.multihost import agreed_stop, is_first, stop_asked
from transformer_flax.training.optimizer import make_optimizer, paper_schedule
from transformer_flax.training.prefetch import prefetch
from transformer_flax.training.pretrained_embeddings import with_vectors
from transformer_flax.training.resume import prune, resume
from transformer_flax.training.run_directory import Workdir
from transformer_flax.training.run_writer import Record
from transformer_flax.training.seeds import Seeds, check_seeds
from transformer_flax.training.setup import check, model_config, prepare_data, require_run
from transformer_flax.training.sharding import Parallel, make_parallel
from transformer_flax.training.step import Metrics, TrainState, init_key, make_eval_step, make_train_step
from transformer_flax.training.tasks import make_task

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # read when the backend starts
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
    require_run(config)
    return _train({config.seed: pathlib.Path(workdir)}, complete(config), profile=profile)[0]


def train_seeds(
    config: ConfigDict, seeds: Sequence[int], workdir: str | os.PathLike, *, profile: bool = False
) -> list[dict[str, Evaluation]]:
    """Trains `config` with several seeds as one program, each as `train` would alone, in `<workdir>/seed<k>`.

    They go on from the newest step of which all have a checkpoint.

    Raises:
      UserError: as `train` does; what ends one of them ends all.
    """
    require_run(config)
    config = complete(config)
    check_seeds(config, seeds)
    return _train({seed: pathlib.Path(workdir) / f"seed{seed}" for seed in seeds}, config, profile=profile)


def _train(workdirs: dict[int, pathlib.Path], config: ConfigDict, *, profile: bool) -> list[dict[str, Evaluation]]:
    configs = {path: config.copy_and_resolve_references() for path in workdirs.values()}
    for seed, own in zip(workdirs, configs.values(), strict=True):
        own.seed = seed
        check(own)
    if config.deterministic and DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    model = model_config(config, config.data.vocab_size)
    compiled = keep_compiled(config.data.cache_dir)
    with Progress(quiet=not is_first()) as progress:
        rows, parts = config.data.rows_multiple_of, (config.accumulation_steps, config.loss_chunks)
        parallel = make_parallel(config.parallel, rows, *parts)
        kind = jax.devices()[0].device_kind
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        seeds = f", {len(workdirs)} seeds at once" if len(workdirs) > 1 else ""
        progress.say(
            f"{config.name}: {_describe(model)}\n"
            f"on {parallel.num_devices} x {kind}{processes}, {config.parallel.mode}, {config.model.dtype}{seeds}; "
            f"compiled programs are kept in {compiled}"
        )
        records = []
        for path, own in configs.items():
            data = prepare_data(own, Workdir(path), progress)
            label = f"seed {own.seed}: " if seeds else ""
            records.append(Record(own, Workdir(path), data, progress, label=label))
        size = records[0].data.tokenizer.vocab_size
        if size != config.data.vocab_size:  # fewer words than it may have
            progress.say(f"the text's own vocabulary: {_describe(model_config(config, size))}")
        return Trainer(records, parallel, progress, profile=profile and is_first()).run()


def _describe(model: ModelConfig) -> str:
    parameters = count_parameters(model)
    rest = sum(count for module, count in parameters.items() if not module.endswith("embedding"))
    return f"{sum(parameters.values()):,} parameters with a vocabulary of {model.vocab_size:,}, {rest:,} without"


class Trainer:
    """Runs that differ in their seed, of which there is mostly one: their programs, their state and their loop."""

    def __init__(
        self,
        records: Sequence[Record],
        parallel: Parallel,
        progress: Progress,
        *,
        profile: bool = False,
    ):
        self._records, self._seeds = records, Seeds(len(records))
        self._profile, self._progress, self._parallel = profile, progress, parallel
        self._config = config = records[0].config  # all but the seed of which is the same in all
        data = records[0].data
        self._compilations: collections.Counter[str] = collections.Counter()

        self._model = model = make_model(model_config(config, data.tokenizer.vocab_size))
        self._task = make_task(config, model, data)
        optimizer = make_optimizer(config.optimizer, config.model.d_model)
        self._schedule = paper_schedule(config.model.d_model, config.optimizer.warmup_steps, config.optimizer.factor)
        loss_fn = parallel.gathering(self._task.loss_fn)
        axis_name = parallel.axis_name
        train_step = make_train_step(
            loss_fn,
            optimizer,
            accumulation_steps=config.accumulation_steps,
            ema_decay=config.ema_decay,
            axis_name=axis_name,
        )
        eval_step = make_eval_step(loss_fn, axis_name=axis_name)
        self._together = parallel if self._seeds.count == 1 else parallel.behind_seeds()
        self._train_step = self._together.compile(
            self._counted("training", self._seeds.map(train_step)), donate_state=True
        )
        self._eval_step = parallel.compile(self._counted("evaluation", eval_step))
        self._init = lambda seed: TrainState.create(
            seed,
            with_vectors(init_params(model.config, init_key(seed)), data.initial),
            optimizer,
            keep_ema=config.ema_decay > 0,
        )
        self._evaluators = {
            split: Evaluator(
                split,
                data.pairs[split],
                data.corpora[split],
                config,
                eval_step=self._eval_step,
                parallel=parallel,
                task=self._task,
                progress=progress,
            )
            for split in data.pairs
        }

    def _counted(self, name: str, function: Callable) -> Callable:
        def traced(*args):
            self._compilations[name] += 1  # runs while tracing only, which is once for every shape
            return function(*args)

        return traced

    def run(self) -> list[dict[str, Evaluation]]:
        """Trains to the last step, and evaluates every split with the parameters it ends with.

        Raises:
          Interrupted: a signal asked for an end; nothing that was done is lost.
        """
        with contextlib.ExitStack() as stack:
            self._interruption = stack.enter_context(Interruption())
            for record in self._records:
                record.open(stack, self._task)
            state, start = self._restore(stack)
            if start < self._config.steps:
                for record, own in zip(self._records, self._own(state), strict=True):
                    if self._is_evaluated_after(start) and not record.writer.has(start, "valid"):  # it was interrupted
                        self._evaluate(record, own)
                if not self._out_of_patience(start):
                    state = self._train(state, start)
            else:
                self._progress.say(f"the run has ended at step {start:,} already; for more: --config.steps=N")
            evaluations = [
                self._evaluate(record, own, last=True)
                for record, own in zip(self._records, self._own(state), strict=True)
            ]
            for record, each in zip(self._records, evaluations, strict=True):
                self._report(record, each, _step_of(state))
            return evaluations

    def _own(self, state: TrainState) -> list[TrainState]:
        """The state of each run, on the devices."""
        return self._seeds.split(state)

    def _restore(self, stack: contextlib.ExitStack) -> tuple[TrainState, int]:
        """The state to go on from, on all devices, and its step; the files of all records are at that step."""
        states, start = resume(self._records, jax.eval_shape(functools.partial(self._init, 0)), stack)
        states = states or [self._init(record.config.seed) for record in self._records]
        return self._parallel.place(self._seeds.stack(states)), start

    def _is_evaluated_after(self, step: int) -> bool:
        every = self._config.eval.every
        return every > 0 and step > 0 and step % every == 0 and step != self._config.steps

    def _batch(self, step: int):
        return self._together.shard(self._seeds.stack([record.data.train[step - 1] for record in self._records]))

    def _train(self, state: TrainState, start: int) -> TrainState:
        """Makes the steps from `start` to the last, unless patience ends before; saves and returns the state."""
        config = self._config
        wait = jax.default_backend() == "cpu"  # where a sharded step that overtakes another one deadlocks
        unread: Metrics | None = None  # of the step before, read while the device works on the next
        steps = range(start + 1, config.steps + 1)
        profiled = steps[PROFILED] if self._profile else range(0)
        batches = prefetch(self._batch, steps)
        with (
            self._progress.bar("training", start) as update,
            contextlib.closing(batches),
            contextlib.ExitStack() as trace,
        ):
            for step in steps:
                if step == profiled.start:
                    trace.enter_context(jax.profiler.trace(str(self._records[0].workdir.profile)))
                started, compilations = time.perf_counter(), self._compilations.total()
                state, metrics = self._train_step(state, next(batches))
                if wait:
                    jax.block_until_ready(state)
                if unread is not None:
                    self._read(unread, step - 1)
                unread = metrics

                last, interrupted = step == config.steps, agreed_stop(self._interruption.asked)
                log = last or step % config.log.every == 0
                evaluate = self._is_evaluated_after(step)
                save = last or evaluate or interrupted or step % config.checkpoint.every == 0
                if log or save:  # what is logged or saved is of this step too
                    self._read(metrics, step)
                    unread = None
                if compilations == self._compilations.total():
                    self._add_time(step, time.perf_counter() - started)
                update(step, config.steps)
                if step in profiled and step + 1 not in profiled:
                    jax.block_until_ready(state)
                    trace.close()
                    place = self._records[0].workdir.profile
                    self._progress.say(f"profile of steps {profiled.start:,} to {step:,}: {place}")

                if log:
                    update(step, config.steps, note=self._log(step, metrics))
                for record in self._records:
                    with record.writing():
                        record.checkpoints.check()
                if save:
                    self._wait(must=False)
                    for record, own in zip(self._records, self._own(self._parallel.unreplicate(state)), strict=True):
                        with contextlib.nullcontext() if interrupted or last else record.writing():
                            record.save(own)
                if interrupted and not last:
                    self._wait(must=True)
                    self._interruption.end(f"after step {step:,}, which is saved")
                if evaluate:
                    for record, own in zip(self._records, self._own(state), strict=True):
                        self._evaluate(record, own)
                    if self._out_of_patience(step):
                        if not log:
                            self._log(step, metrics)
                        self._wait(must=True)
                        [record] = self._records
                        if step not in record.checkpoints.steps():  # config.on_write_failure let it go
                            record.save(self._parallel.unreplicate(state))
                        break
        self._wait(must=True)
        return state

    def _out_of_patience(self, step: int) -> bool:
        """Whether the run, which is alone where it has patience, ends at this step."""
        if not self._records[0].out_of_patience:
            return False
        patience = counted(self._config.eval.patience, "evaluation")
        self._progress.say(f"no better validation loss in {patience}: the run ends at step {step:,}")
        return True

    def _wait(self, *, must: bool) -> None:
        """Waits until all runs have written their checkpoints, and only then deletes old ones.

        Args:
          must: end the run where one cannot be written, whatever config.on_write_failure says.
        """
        for record in self._records:
            with contextlib.nullcontext() if must else record.writing():
                record.checkpoints.wait()
        prune(self._records)

    def _read(self, metrics: Metrics, step: int) -> None:
        """Waits for the metrics of a step and adds them up.

        Raises:
          UserError: too many updates in a row were not finite.
        """
        for record, own in zip(self._records, self._on_host(metrics), strict=True):
            record.read(own, step)

    def _on_host(self, metrics: Metrics) -> list[Metrics]:
        """Those of each run."""
        return self._seeds.split(self._parallel.unreplicate(jax.device_get(metrics)))

    def _add_time(self, step: int, seconds: float) -> None:
        """Notes the time of a step, which all seeds have taken together, and what each has done in it."""
        for record in self._records:
            lengths = record.data.train.lengths(step - 1)
            tokens = sum(int(lengths[side].sum()) for side in kind_of(self._model.config).reads)
            flops = training_flops(self._model.config, *lengths.values())
            record.meter.add_time(seconds, tokens, flops)

    def _log(self, step: int, metrics: Metrics) -> str:
        """Writes what was measured since the last time, and the gradient of this step; returns the last in short."""
        note = ""
        for record, own in zip(self._records, self._on_host(metrics), strict=True):
            updates = step - 1 - own.skipped + (own.skipped_in_a_row > 0)  # made before this one
            learning_rate = float(self._schedule(updates))
            now = {"learning_rate": learning_rate, "grad_norm": float(own.grad_norm), "skipped": int(own.skipped)}
            means, rates = record.meter.means(), record.meter.rates()
            if rates:
                devices = 1 if jax.default_backend() == "cpu" else self._parallel.num_devices  # which share all cores
                flops_per_second = self._seeds.count * rates["flops_per_second"]  # of all together
                rates["mfu"] = flops_per_second / (devices * peak_flops(self._config.model.dtype))
            if self._seeds.count > 1:
                rates["seeds_at_once"] = self._seeds.count
            record.log(step, {**now, **rates})
            note = f"lr {learning_rate:.2e}"
            if "loss" in means:  # else all since the last time were skipped
                note = f"loss {means['loss']:.3f}  ppl {means['perplexity']:.2f}  {note}"
            left = ""
            if "mfu" in rates:
                note += f"  {rates['steps_per_second']:.2f} steps/s  {rates['tokens_per_second']:,.0f} tokens/s"
                note += f"  MFU {rates['mfu']:.0%}"
                left = f"  {duration((self._config.steps - step) / rates['steps_per_second'])} left"
            record.say(f"step {step:>7,}/{self._config.steps:,}  {note}{left}")
        return note

    def _evaluate(self, record: Record, state: TrainState, *, last: bool = False) -> dict[str, Evaluation]:
        """Evaluates the validation split, and all splits after the last step; shows and keeps what is put out.

        Raises:
          Interrupted: it is done anew when the run goes on.
        """
        config = self._config.eval
        step = _step_of(state)
        average = config.final_average if last else config.average
        if state.ema is not None:
            params, choice = self._parallel.unreplicate(state.ema), Choice([step], EMA)
        elif average > 1:
            with record.writing():
                record.checkpoints.wait()  # the newest may still be on its way to the disk
            params, choice = record.average(self._parallel.local(state.params), step, average)
        else:
            params, choice = self._parallel.unreplicate(state.params), Choice([step])
        record.say(f"evaluating {choice}")
        evaluations = {}
        for split, evaluator in self._evaluators.items():
            if split == "valid" or last:
                evaluations[split] = evaluator(
                    params,
                    check=functools.partial(self._check, f"while evaluating step {step:,}, which is saved"),
                    max_sentences=0 if last else config.sentences,
                )
                record.keep(split, step, evaluations[split], len(choice.steps), final=last)
        record.show(evaluations["valid"])
        return evaluations

    def _check(self, where: str, *, alone: bool) -> None:
        """Ends the run if it was asked to; of several processes, all of them.

        Args:
          where: it is.
          alone: whether the first process works while the others wait for it.

        Raises:
          Interrupted: it was.
        """
        if (stop_asked if alone else agreed_stop)(self._interruption.asked):
            self._interruption.end(where)

    def _report(self, record: Record, evaluations: dict[str, Evaluation], step: int) -> None:
        columns = list(evaluations["valid"].scalars)
        rows = [
            [split, *(f"{evaluation.scalars[name]:.4f}" for name in columns)]
            for split, evaluation in evaluations.items()
        ]
        seed = f", seed {record.config.seed}," if self._seeds.count > 1 else ""
        self._progress.table(f"{self._config.name}{seed} after {step:,} steps", ["split", *columns], rows)
        counts = {**self._compilations, self._task.outputs: self._task.compilations}
        path = record.workdir.path
        for label, text in {
            **evaluations["valid"].signatures,
            "time": f"{duration(record.writer.seconds)} since the run began",
            "compilations": ", ".join(f"{count} {name}" for name, count in counts.items()),
            "everything": f"{path}/ (config, tokenizer, checkpoints, metrics.jsonl, {self._task.outputs})",
            "curves": f"tensorboard --logdir {path} (pip install tensorboard)",
        }.items():
            self._progress.say(f"{label + ':':<14}{text}")


def _step_of(state: TrainState) -> int:
    """The step of a state, which all seeds share."""
    return int(np.ravel(state.step)[0])

"""The expected FLOPs and seconds of a sweep's trials, and its plan, as `--dry_run` prints it."""

import functools
import math
import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np

from transformer_flax.ablation.results import RESULTS, Result, read, require_same_base, require_same_variants
from transformer_flax.ablation.trials import Trial, TrialFactory, make_jobs
from transformer_flax.ablation.variants import Variant
from transformer_flax.console import Progress, counted, duration
from transformer_flax.errors import UserError
from transformer_flax.model.flops import count_parameters, training_flops
from transformer_flax.training.config_checks import device_dtype, model_config
from transformer_flax.training.config_fields import AUTO, flatten
from transformer_flax.training.loss import passes
from transformer_flax.training.peak_flops import measured_flops

UTILISATION = 0.3  # assumed share of a large matrix product's rate, until a trial has finished
TYPICAL_LENGTH = 1 / 4  # length of a typical sentence, as a share of data.max_length


@functools.cache
def assumed_flops(variant: Variant) -> float:
    """Returns the FLOPs of all training steps, assuming full batches of sentences of typical length. Reads no data."""
    config = variant.config
    length = max(2, round(TYPICAL_LENGTH * config.data.max_length))
    lengths = np.full(max(1, config.data.tokens_per_batch // length), length)
    model = model_config(config, config.data.vocab_size)
    return float(config.steps) * passes(config) * training_flops(model, lengths, lengths)


def assumed_left(trial: Trial, step: int = 0) -> float:
    """Returns the part of `assumed_flops` that a trial needs after a step."""
    return assumed_flops(trial.variant) * (1 - step / trial.steps)


def estimate(trials: Sequence[Trial], results: Iterable[Result], rate: float = math.nan) -> tuple[float, float]:
    """Returns the expected FLOPs and seconds for each assumed FLOP, from the finished trials of the sweep.

    If no trial has finished, the seconds follow from `rate`, the FLOPs a second of a large matrix product on all
    devices.
    """
    assumed = {trial.key: assumed_flops(trial.variant) for trial in trials}
    known = [result for result in results if result.finished and result.key in assumed]
    if not known:
        return 1.0, 1 / (rate * UTILISATION)
    timed = [result for result in known if result.flops]
    flops = sum(r.flops for r in timed) / sum(assumed[r.key] for r in timed) if timed else 1.0
    return flops, sum(result.seconds for result in known) / sum(assumed[result.key] for result in known)


def measured_rate(dtype: str) -> float:
    """Measures the FLOPs a second of a large matrix product on all devices; AUTO is the dtype that suits them.

    Another process measures, and frees the devices when it ends.
    """
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as another:
            return another.submit(_measure_rate, dtype).result()
    except Exception as error:  # whatever JAX raises without a working device or free memory
        raise UserError(
            f"the rate of this machine cannot be measured ({type(error).__name__}: {error}); try again when nothing "
            "else uses its devices"
        ) from error


def _measure_rate(dtype: str) -> float:
    devices = 1 if jax.default_backend() == "cpu" else jax.device_count()  # on a CPU, one product takes all cores
    return devices * measured_flops(device_dtype() if dtype == AUTO else dtype)


def show_plan(trials: Sequence[Trial], factory: TrialFactory, *, together: bool) -> None:
    """Prints the trials of a sweep, their expected cost, and the commands of the unfinished trials."""
    file = factory.workdir / RESULTS
    head, results = read(file) if file.exists() else ({}, [])
    if head:
        require_same_base(head["config"], flatten(factory.base.to_dict()), file)
        require_same_variants(results, {trial.variant.name: trial.variant.changes for trial in trials}, file)
    known = {result.key: result for result in results if result.finished}
    found = {trial: known.get(trial.key) or trial.result() for trial in trials}
    finished = [result for result in found.values() if result]
    rate = math.nan if finished else measured_rate(factory.base.model.dtype)
    progress = Progress()
    variants = {trial.variant for trial in trials}
    parameters = {trial.variant: result.parameters for trial, result in found.items() if result}
    with progress, progress.bar("counting parameters and operations") as update:
        for done, variant in enumerate(variants):
            update(done, len(variants))
            assumed_flops(variant)
            if variant not in parameters:  # a text with fewer pieces than the config's vocabulary has a smaller model
                model = model_config(variant.config, variant.config.data.vocab_size)
                parameters[variant] = sum(count_parameters(model).values())
    flops, seconds = estimate(trials, finished, rate)  # for each assumed FLOP
    if finished:
        source = f"time and FLOPs as in {counted(len(finished), 'run')} that finished"
    else:
        source = (
            f"FLOPs of full batches; time without evaluations, assuming {UTILISATION:.0%} of the "
            f"{rate / 1e9:,.1f} GFLOP/s that a large matrix product reaches here"
        )
    rows = []
    left = {trial: trial.progress().step for trial, result in found.items() if not result}
    for trial in trials:
        state = "finished" if trial not in left else f"at step {left[trial]:,}" if left[trial] else ""
        cells = [str(trial), state, f"{parameters[trial.variant]:,}", f"{trial.steps:,}"]
        rows.append([*cells, f"{flops * assumed_left(trial):.2e}", duration(seconds * assumed_left(trial))])
    columns = ["run", "state", "parameters", "steps", "FLOPs", "time"]
    progress.table(f"{counted(len(trials), 'run')} in {factory.workdir}", columns, rows)
    for job in make_jobs(list(left), results, together=together):
        progress.say(factory.shown(job))
    to_do = sum(assumed_left(trial, step) for trial, step in left.items())
    cost = f"{flops * to_do:.2e} FLOPs, {duration(seconds * to_do)} one after another"
    progress.say(f"{counted(len(left), 'run')} to make: {cost} ({source})")

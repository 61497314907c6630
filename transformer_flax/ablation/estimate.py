"""What a sweep will cost, before it is made."""

import dataclasses
import functools
import math
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from transformer_flax.ablation.jobs import Run
from transformer_flax.ablation.results import Result
from transformer_flax.ablation.variants import Variant
from transformer_flax.errors import UserError
from transformer_flax.model.flops import count_parameters, training_flops
from transformer_flax.training.config_checks import model_config

UTILISATION = 0.3  # of the rate of a large matrix product, that is assumed where nothing has been measured yet
TYPICAL_LENGTH = 1 / 4  # of a sentence, as a share of data.max_length


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of a run."""

    parameters: int
    flops: float
    seconds: float


def parameters(config: ConfigDict) -> int:
    """Of a run's model, with a vocabulary as large as its config asks for."""
    return sum(count_parameters(model_config(config, config.data.vocab_size)).values())


@functools.cache
def assumed_flops(variant: Variant) -> float:
    """Of all steps of a run, were its batches full of sentences of a typical length; nothing is read for it."""
    config = variant.config
    length = max(2, round(TYPICAL_LENGTH * config.data.max_length))
    lengths = np.full(max(1, config.data.tokens_per_batch // length), length)
    return float(config.steps) * training_flops(model_config(config, config.data.vocab_size), lengths, lengths)


class Estimator:
    """Tells what runs will cost, from finished runs of the sweep where there are any, else from the machine's rate.

    Args:
      runs: of the sweep.
      results: of its finished runs.
      rate: FLOPs a second of a large matrix product, on all devices; asked for where no run has finished.
    """

    def __init__(self, runs: Sequence[Run], results: Sequence[Result], rate: float | None = None):
        assumed = {(run.variant.name, run.seed): assumed_flops(run.variant) for run in runs}
        known = [r for r in results if r.finished and (r.variant, r.seed) in assumed]
        expected = sum(assumed[r.variant, r.seed] for r in known)
        self.measured = len(known)
        self._flops = sum(r.flops for r in known) / expected if known else 1.0
        self._seconds: float | None = None  # for each FLOP that is assumed
        if known:
            self._seconds = sum(r.seconds for r in known) / expected
        elif rate:
            self._seconds = 1 / (rate * UTILISATION)

    def cost(self, run: Run) -> Cost:
        return Cost(parameters(run.variant.config), self._flops * assumed_flops(run.variant), self.seconds(run))

    def seconds(self, run: Run) -> float:
        """Of a run, as a part of its cost; NaN where nothing is known."""
        return self._seconds * assumed_flops(run.variant) if self._seconds else math.nan


def measured_rate(dtype: str) -> float:
    """FLOPs a second of a large matrix product on all devices, measured by a process that frees them again.

    Raises:
      UserError: JAX finds no device.
    """
    program = (
        "import jax, sys; from transformer_flax.training.compilation_cache import peak_flops; "
        "n = 1 if jax.default_backend() == 'cpu' else jax.device_count(); print(n * peak_flops(sys.argv[1]))"
    )
    result = subprocess.run([sys.executable, "-c", program, dtype], capture_output=True, text=True)
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:] or [f"status {result.returncode}"]
        raise UserError(f"the rate of this machine cannot be measured: {last[0]}")
    return float(result.stdout)

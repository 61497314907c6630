"""The model, the compiled steps and the evaluators of a run.

Runs in one process, for example in a notebook, share their compiled steps if they compute the same.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict, FrozenConfigDict

from transformer_flax.console import Progress
from transformer_flax.model.registry import init_params, make_model, param_shapes
from transformer_flax.training.config_checks import model_config
from transformer_flax.training.evaluation import Evaluator, Task
from transformer_flax.training.fine_tuning import are_trained, with_embeddings
from transformer_flax.training.loss import make_loss
from transformer_flax.training.optimizer import depends_on_steps, make_average, make_optimizer, make_schedule
from transformer_flax.training.setup import PreparedRun
from transformer_flax.training.sharding import Parallel
from transformer_flax.training.step import TrainState, init_key, make_eval_step, make_train_step

# Runs that differ only in these fields share their compiled programs, unless the learning rate depends on `steps`.
NOT_COMPILED = (
    "seed",
    "steps",
    "name",
    "max_skipped",
    "on_write_failure",
    "embedding_init",
    "init_from",
    "data",
    "eval",
    "checkpoint",
    "log",
    "decode",
)


def compiled_fields(config: ConfigDict) -> dict[str, Any]:
    """Returns the fields of a config that its compiled steps depend on."""
    fields = {name: value for name, value in config.to_dict().items() if name not in NOT_COMPILED}
    return fields | {"steps": config.steps} if depends_on_steps(config) else fields


class Steps:
    """The training and evaluation steps of a model, compiled for its devices.

    `config` is the run's config as `compiled_fields` returns it.
    """

    def __init__(self, config: FrozenConfigDict, model: nn.Module, parallel: Parallel):
        self.optimizer, self.average = make_optimizer(config), make_average(config)
        self.traced: collections.Counter[str] = collections.Counter()  # how often each step was compiled, by name
        loss_fn = parallel.gathering(make_loss(config, model))
        # Adam does not change a parameter whose gradient was always zero, and XLA computes nothing for this gradient.
        trained = are_trained(config.train_only, param_shapes(model.config))
        update = make_train_step(
            loss_fn,
            self.optimizer,
            accumulation_steps=config.accumulation_steps,
            average=self.average,
            axis_name=parallel.axis_name,
            trained=lambda tree: jax.tree.map(lambda x, keep: x if keep else jnp.zeros_like(x), tree, trained),
        )
        self.train_step = parallel.compile(self._counted("training", update), donate_state=True)
        # The training step of several seeds. Its states and batches have a leading axis of seeds.
        of_seeds = self._counted("training", jax.vmap(update))
        self.seeds_step = parallel.behind_seeds().compile(of_seeds, donate_state=True)
        eval_step = make_eval_step(loss_fn, axis_name=parallel.axis_name)
        self.eval_step = parallel.compile(self._counted("evaluation", eval_step))

    def _counted(self, name: str, function: Callable) -> Callable:
        """Wraps a function so that `self.traced` counts how often JAX traces the function."""

        def traced(*args):
            self.traced[name] += 1  # runs only during tracing, once for each shape
            return function(*args)

        return traced


# The model is part of the cache's key, because a notebook may register another class under the same kind.
_steps = functools.lru_cache(maxsize=8)(Steps)


class Programs:
    """The model, the compiled steps and the evaluators of a run; the same for every seed."""

    def __init__(self, run: PreparedRun, parallel: Parallel, progress: Progress):
        self._run, self.parallel = run, parallel
        self.model = make_model(model_config(run.config, run.tokenizer.vocab_size))
        self.steps = _steps(FrozenConfigDict(compiled_fields(run.config)), self.model, parallel)
        self._traced_before = self.steps.traced.copy()
        self.task = Task(run, self.model)
        self.schedule = make_schedule(run.config)
        self.evaluators = {
            split: Evaluator(split, run, self.steps.eval_step, parallel, self.task, progress) for split in run.pairs
        }

    @property
    def compilations(self) -> dict[str, int]:
        """The number of programs compiled for this run, by step. Programs of earlier runs do not count."""
        return {name: count - self._traced_before[name] for name, count in self.steps.traced.items()}

    def init(self, seed: int) -> TrainState:
        """Returns the train state before the first step."""
        if self._run.start:
            params = jax.tree.map(jnp.asarray, self._run.start.params)
        else:
            deviation = getattr(self.model.config, "embedding_deviation", 1.0)
            params = with_embeddings(init_params(self.model.config, init_key(seed)), self._run.embeddings, deviation)
        return TrainState.create(seed, params, self.steps.optimizer, keep_ema=self.steps.average is not None)

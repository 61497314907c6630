"""The model, the compiled steps and the evaluators of a run."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from transformer_flax.console import Progress
from transformer_flax.model.registry import init_params, make_model
from transformer_flax.training.config_checks import model_config
from transformer_flax.training.evaluation import Evaluator
from transformer_flax.training.fine_tuning import train_only
from transformer_flax.training.moving_average import keeps_average, make_average
from transformer_flax.training.optimizer import make_optimizer, make_schedule
from transformer_flax.training.pretrained_embeddings import with_embeddings
from transformer_flax.training.setup import Data
from transformer_flax.training.sharding import Parallel
from transformer_flax.training.step import TrainState, init_key, make_eval_step, make_train_step
from transformer_flax.training.tasks import make_task


class Programs:
    """The model of a config, its steps, compiled for its devices, and its evaluators; the same for every seed.

    Args:
      config: of the run.
      data: of the run.
      parallel: its devices.
      progress: for the evaluators' bars.
    """

    def __init__(self, config: ConfigDict, data: Data, parallel: Parallel, progress: Progress):
        self.parallel, self._config, self._data = parallel, config, data
        self.model = make_model(model_config(config, data.tokenizer.vocab_size))
        self.task = make_task(config, self.model, data)
        self.schedule = make_schedule(config.optimizer, config.model.d_model)
        self._optimizer = make_optimizer(config.optimizer, config.model.d_model)
        self.traced: collections.Counter[str] = collections.Counter()  # how often each step was compiled, by its name

        loss_fn = parallel.gathering(self.task.loss_fn)
        self.update = make_train_step(  # not compiled, for several seeds to be mapped over
            loss_fn,
            self._optimizer,
            accumulation_steps=config.accumulation_steps,
            average=make_average(config),
            axis_name=parallel.axis_name,
            trained=self._trained(),
        )
        self.train_step = parallel.compile(self.counted("training", self.update), donate_state=True)
        eval_step = make_eval_step(loss_fn, axis_name=parallel.axis_name)
        eval_step = parallel.compile(self.counted("evaluation", eval_step))
        self.evaluators = {
            split: Evaluator(
                split,
                data.pairs[split],
                data.corpora[split],
                config,
                eval_step=eval_step,
                parallel=parallel,
                task=self.task,
                progress=progress,
            )
            for split in data.pairs
        }

    def counted(self, name: str, function: Callable) -> Callable:
        """Wraps a function, to count in `traced` how often it is traced."""

        def traced(*args):
            self.traced[name] += 1  # runs while tracing only, which is once for every shape
            return function(*args)

        return traced

    def init(self, seed: int) -> TrainState:
        """The state before the first step."""
        return TrainState.create(seed, self._init_params(seed), self._optimizer, keep_ema=keeps_average(self._config))

    def _trained(self) -> Callable[[Any], Any]:
        patterns = self._config.train_only
        return train_only(patterns, jax.eval_shape(self._init_params, 0)) if patterns else lambda grads: grads

    def _init_params(self, seed: int) -> Any:
        if self._data.start:
            return jax.tree.map(jnp.asarray, self._data.start.params)
        return with_embeddings(init_params(self.model.config, init_key(seed)), self._data.embeddings)

"""One update as a pure function: `train_step(state, batch) -> (state, metrics)`."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from transformer_flax.training.loss import LossFn, Sums, split_rows
from transformer_flax.training.optimizer import Average


class TrainState(flax.struct.PyTreeNode):
    """The state that training carries from step to step. All randomness is a function of (seed, step)."""

    step: jax.Array  # int32 [], batches seen so far
    seed: jax.Array  # uint32 []
    params: Any
    opt_state: Any
    skipped: jax.Array  # int32 [], updates that were not made because they were not finite
    skipped_in_a_row: jax.Array  # int32 [], updates skipped since the last update that was made
    ema: Any = None  # the average of the parameters, config.ema_decay's or Schedule-Free's (`optimizer.Average`)

    @classmethod
    def create(
        cls, seed: int, params: Any, optimizer: optax.GradientTransformation, *, keep_ema: bool = False
    ) -> "TrainState":
        # No two leaves share a buffer, because each is overwritten. Some optimizers keep the parameters given.
        ema = jax.tree.map(jnp.copy, params) if keep_ema else None
        opt_state = optimizer.init(jax.tree.map(jnp.copy, params))
        step, skipped, skipped_in_a_row = jnp.zeros((3,), jnp.int32)
        return cls(step, jnp.uint32(seed), params, opt_state, skipped, skipped_in_a_row, ema)


class Metrics(flax.struct.PyTreeNode):
    """Sums over all tokens of an update, and their counts. The sums are divided by the counts when they are read."""

    sums: Sums
    counts: Sums
    grad_norm: jax.Array
    skipped: jax.Array  # as in the state after the update
    skipped_in_a_row: jax.Array


def init_key(seed: int) -> jax.Array:
    """Returns the key of a run's initial parameters."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def dropout_key(state: TrainState) -> jax.Array:
    """Returns the key of all randomness in the next update of `state`."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(state.seed), 1), state.step)


def sum_gradients(
    loss_fn: LossFn, params: Any, batch: Any, key: jax.Array, accumulation_steps: int
) -> tuple[Any, Sums, Sums]:
    """Returns the gradient of the summed loss, the sums and the counts, over `accumulation_steps` micro-batches."""

    def gradient(micro_batch, key):
        def loss(params):
            sums, counts = loss_fn(params, micro_batch, key)
            return sums["loss"], (sums, counts)

        grads, (sums, counts) = jax.grad(loss, has_aux=True)(params)
        return grads, sums, counts

    if accumulation_steps == 1:
        return gradient(batch, key)
    micro_batches = jax.tree.map(lambda x: split_rows(x, accumulation_steps), batch)

    def add(total, i_and_micro_batch):
        i, micro_batch = i_and_micro_batch
        return jax.tree.map(jnp.add, total, gradient(micro_batch, jax.random.fold_in(key, i))), None

    first = jax.tree.map(lambda x: x[0], micro_batches)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient, first, key))
    return jax.lax.scan(add, zeros, (jnp.arange(accumulation_steps), micro_batches))[0]


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    accumulation_steps: int = 1,
    average: Average | None = None,
    axis_name: str | None = None,
    trained: Callable[[Any], Any] = lambda tree: tree,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """Returns the train step. It sums before it divides: without dropout, devices and micro-batches change no update.

    Each micro-batch and, under pmap, each device has dropout of its own.

    If the loss or the gradient of a batch is not finite, parameters, optimizer state and moving average stay unchanged.
    Only the step advances, and with it the data and the keys.

    Args:
      loss_fn: `(params, batch, key) -> (sums, counts)`; training minimises sums["loss"] / counts["loss"].
      optimizer: an optimizer whose state stays unchanged with `update(..., finite=False)`, as `make_optimizer`'s.
      accumulation_steps: micro-batches per update; must divide the rows of a batch.
      average: the moving average that a state keeps as its `ema`; None: no moving average.
      axis_name: the mapped axis of devices under pmap, over which to sum; None under jit, where a batch is global.
      trained: replaces gradients and updates of parameters that are not trained by zeros. Without a gradient, weight
        decay would still change a parameter.
    """

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        key = dropout_key(state)
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        params = average.where_gradients_are_taken(state.ema, state.params) if average else state.params
        grads, sums, counts = sum_gradients(loss_fn, params, batch, key, accumulation_steps)
        if axis_name is not None:
            grads, sums, counts = jax.lax.psum((grads, sums, counts), axis_name)
        grads = jax.tree.map(lambda g: g / counts["loss"], trained(grads))
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(sums["loss"])
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, finite=finite)
        params = optax.tree.where(finite, optax.apply_updates(state.params, trained(updates)), state.params)
        made = state.step + 1 - state.skipped  # updates, with this one
        ema = optax.tree.where(finite, average.update(state.ema, params, made), state.ema) if average else state.ema
        state = state.replace(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            ema=ema,
            skipped=state.skipped + ~finite,
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        )
        return state, Metrics(sums, counts, grad_norm, state.skipped, state.skipped_in_a_row)

    return train_step


def make_eval_step(loss_fn: LossFn, *, axis_name: str | None = None) -> Callable[[Any, Any], tuple[Sums, Sums]]:
    """Returns `eval_step(params, batch) -> (sums, counts)`, without dropout."""

    def eval_step(params: Any, batch: Any) -> tuple[Sums, Sums]:
        sums, counts = loss_fn(params, batch, None)
        return (sums, counts) if axis_name is None else jax.lax.psum((sums, counts), axis_name)

    return eval_step

"""The cost of a run, computed from its config alone."""

import dataclasses

import jax
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.data.batches import rows_that_fit
from transformer_flax.errors import UserError
from transformer_flax.model.flops import activation_bytes, count_parameters, forward_flops, training_flops
from transformer_flax.model.registry import kind_of, param_shapes
from transformer_flax.training.config_checks import check, model_config
from transformer_flax.training.fine_tuning import complete_run
from transformer_flax.training.loss import passes
from transformer_flax.training.optimizer import keeps_average, make_optimizer


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a run."""

    parameters: dict[str, int]  # by module
    tokens_per_step: int  # source and target tokens of a full batch
    forward_flops: dict[str, int]  # of a step, by module
    step_flops: int  # of a step, forward and backward
    memory: dict[str, int]  # bytes by use, if one device holds all
    steps: int
    training_flops: int  # of all steps, as the model counts them
    table2_flops: float  # as the paper's table 2 counts them: time x devices x peak
    device: str
    tokens_per_second: float
    days: float


def cost_of(config: ConfigDict, *, device: str, peak: float, num_devices: int, utilisation: float, length: int) -> Cost:
    """Computes a run's cost on `num_devices` devices, with sentences of `length` tokens.

    `peak` is the FLOPs a second of one device, and `utilisation` the share of it that training reaches, above 0.
    """
    config = complete_run(config)
    check(config)
    model, data = model_config(config, config.data.vocab_size), config.data
    longest = min(data.max_length, data.tokens_per_batch // data.rows_multiple_of)
    if length > longest:
        raise UserError(
            f"--length is {length}; it must be at most {longest}, the smaller of config.data.max_length and "
            "config.data.tokens_per_batch / config.data.rows_multiple_of"
        )

    rows = rows_that_fit(length, data.tokens_per_batch, data.rows_multiple_of)
    lengths = np.full(passes(config) * rows, length)
    parameters = count_parameters(model)
    step_flops = training_flops(model, lengths, lengths)
    total = 4 * sum(parameters.values())  # float32
    moments = jax.eval_shape(make_optimizer(config).init, param_shapes(model))
    tokens = len(kind_of(model).reads) * rows * length
    width = data.max_length if data.batching == "packed" else length  # of a row, to which attention is quadratic
    full_rows = rows_that_fit(width, data.tokens_per_batch, data.rows_multiple_of)
    activations = activation_bytes(
        model, passes(config) * full_rows // config.accumulation_steps, width, width, loss_chunks=config.loss_chunks
    )
    # Memory holds a micro-batch's gradient beside the sum. It reuses the memory of the activations.
    own_gradient = max(0, total - activations) if config.accumulation_steps > 1 else 0
    step_seconds = step_flops / (num_devices * peak * utilisation)
    return Cost(
        parameters=parameters,
        tokens_per_step=tokens,
        forward_flops=forward_flops(model, lengths, lengths),
        step_flops=step_flops,
        memory={
            "parameters": total,
            "gradient": total + own_gradient,
            "optimizer": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(moments) if leaf.ndim),
            "moving average": total if keeps_average(config) else 0,
            "activations": activations,
        },
        steps=config.steps,
        training_flops=config.steps * step_flops,
        table2_flops=config.steps * step_flops / utilisation,
        device=f"{num_devices} x {device}, {peak / 1e12:g} TFLOP/s each, of which {utilisation:.0%} are reached",
        tokens_per_second=tokens / step_seconds,
        days=config.steps * step_seconds / 86_400,
    )

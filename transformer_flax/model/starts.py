"""The initial values of models with many layers: DeepNorm, T-Fixup and Admin, three values of `config.model.start`."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp

from transformer_flax.model.config import EncoderConfig, TransformerConfig

# The sub-layers of a layer in order, by the names of their residual connections.
RESIDUALS = ("after_self_attention", "after_cross_attention", "after_feed_forward")


def with_start(config: EncoderConfig, *, decoder: bool) -> tuple[EncoderConfig, float]:
    """Returns the config of a stack's layers, and the alpha of their residuals: LayerNorm(alpha x + Sublayer(x)).

    DeepNorm (Wang et al., 2022, figure 2) and T-Fixup (Huang et al., 2020, section 3.3) multiply the initial W^V, W^O,
    W_1 and W_2 by beta, as `branch_init` does. The factors of encoder and decoder differ. DeepNorm's factors of an
    encoder depend on whether a decoder follows it.
    """
    n = config.num_layers  # of the encoder, N, and of the decoder, M
    alpha = beta = 1.0
    if config.start == "t_fixup":
        beta = (9 * n) ** -0.25 if decoder else 0.67 * n**-0.25
    elif config.start == "deepnorm":
        if not isinstance(config, TransformerConfig):
            alpha, beta = (2 * n) ** 0.25, (8 * n) ** -0.25
        elif decoder:
            alpha, beta = (3 * n) ** 0.25, (12 * n) ** -0.25
        else:
            alpha, beta = 0.81 * n ** (5 / 16), 0.87 * n ** (-5 / 16)  # (N^4 M)^(1/16) with M = N
    return dataclasses.replace(config, branch_init=beta * config.branch_init), alpha


def with_omegas(params: Any, sown: Any) -> Any:
    """Sets each omega of LayerNorm(omega x + Sublayer(x)) to its first value, as Admin does (Liu et al., 2020).

    The first omega of a stack is 1. The square of every other omega is the variance of omega x + Sublayer(x) in the
    sub-layer before, if x and Sublayer(x) are independent.

    Args:
      params: initial parameters, in which every omega is 1.
      sown: the variances of x and of Sublayer(x) in a pass with these parameters, by layer and residual connection.
    """
    params = {**params}
    for stack in ("encoder", "decoder"):
        square = 1.0
        for layer in itertools.takewhile(params.__contains__, (f"{stack}_{n}" for n in itertools.count())):
            residuals = {name: params[layer][name] for name in RESIDUALS if name in params[layer]}
            for name, residual in residuals.items():
                residuals[name] = residual | {"omega": jnp.full_like(residual["omega"], square**0.5)}
                [[of_x, of_sublayer]] = sown[layer][name]["variances"]
                square = square * of_x + of_sublayer
            params[layer] = params[layer] | residuals
    return params

"""Residual connections other than the paper's `AddAndNorm`: pre-norm, DeepNorm, T-Fixup and Admin.

`pre_norm` and `start` of the config choose one, and `start` also the initial values that belong to it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.model.config import LayerConfig, TransformerConfig
from transformer_flax.model.dropout import Dropout
from transformer_flax.model.layers import AddAndNorm, Sublayer, layer_norm
from transformer_flax.special_tokens import NUM_SPECIAL

# The sub-layers of a layer in order, by the names of their residual connections.
RESIDUALS = ("after_self_attention", "after_cross_attention", "after_feed_forward")
SENTENCES, LENGTH = 64, 16  # of the random sentences on which Admin measures variances


class PreNorm(nn.Module):
    """x + Dropout(Sublayer(LayerNorm(x))), as in the authors' later code."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: jax.Array, sublayer: Sublayer) -> jax.Array:
        norm, dropout = layer_norm(self.config, "norm"), Dropout(self.config.dropout)
        return x + dropout(sublayer(norm(x)))


class DeepNorm(nn.Module):
    """LayerNorm(alpha x + Dropout(Sublayer(x))), with a constant alpha (Wang et al., 2022)."""

    config: LayerConfig
    alpha: float

    @nn.compact
    def __call__(self, x: jax.Array, sublayer: Sublayer) -> jax.Array:
        norm, dropout = layer_norm(self.config, "norm"), Dropout(self.config.dropout)
        return norm(self.alpha * x + dropout(sublayer(x)))


class TFixup(nn.Module):
    """x + Dropout(Sublayer(x)), without LayerNorm (Huang et al., 2020)."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: jax.Array, sublayer: Sublayer) -> jax.Array:
        return x + Dropout(self.config.dropout)(sublayer(x))


class Admin(nn.Module):
    """LayerNorm(omega x + Dropout(Sublayer(x))), with a parameter omega [d_model] (Liu et al., 2020)."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: jax.Array, sublayer: Sublayer) -> jax.Array:
        norm, dropout = layer_norm(self.config, "norm"), Dropout(self.config.dropout)
        omega = self.param("omega", nn.initializers.ones, x.shape[-1:])
        y = sublayer(x)
        if self.is_initializing():
            self.sow("intermediates", "variances", jnp.stack([jnp.var(v, dtype=jnp.float32) for v in (x, y)]))
        # omega is float32, and so is the product: the gradient of omega is a sum over all tokens of a batch.
        return norm(omega * x + dropout(y))


def choose_start(config: LayerConfig, *, decoder: bool) -> tuple[LayerConfig, Callable[[LayerConfig], nn.Module]]:
    """Returns the config of a stack's layers, and the residual connection around their sub-layers.

    DeepNorm (Wang et al., 2022, figure 2) and T-Fixup (Huang et al., 2020, section 3.3) multiply the initial W^V, W^O,
    W_1 and W_2 by beta, as `branch_init` of the returned config says. The factors of encoder and decoder differ.
    DeepNorm's factors of an encoder depend on whether a decoder follows it.
    """
    n = config.num_layers  # of the encoder, N, and of the decoder, M
    beta, residual = 1.0, PreNorm if config.pre_norm else AddAndNorm
    if config.start == "admin":
        residual = Admin
    elif config.start == "t_fixup":
        beta, residual = (9 * n) ** -0.25 if decoder else 0.67 * n**-0.25, TFixup
    elif config.start == "deepnorm":
        if not isinstance(config, TransformerConfig):
            alpha, beta = (2 * n) ** 0.25, (8 * n) ** -0.25
        elif decoder:
            alpha, beta = (3 * n) ** 0.25, (12 * n) ** -0.25
        else:
            alpha, beta = 0.81 * n ** (5 / 16), 0.87 * n ** (-5 / 16)  # (N^4 M)^(1/16) with M = N
        residual = functools.partial(DeepNorm, alpha=alpha)
    return dataclasses.replace(config, branch_init=beta * config.branch_init), residual


def init_admin(model: Any, key: jax.Array, sides: int) -> Any:
    """Returns initial parameters of a model with `start="admin"`, which reads `sides` sequences of tokens.

    Every omega is computed from a pass of the model over random sentences.
    """
    config = model.config
    shape = (sides, SENTENCES, min(LENGTH, config.most_positions))
    tokens = jax.random.randint(jax.random.fold_in(key, 0), shape, NUM_SPECIAL, config.vocab_size)
    initial = model.init(key, *tokens, mutable=["params", "intermediates"])
    return with_omegas(initial["params"], initial["intermediates"])


def with_omegas(params: Any, sown: Any) -> Any:
    """Returns parameters with the first value of each omega of LayerNorm(omega x + Sublayer(x)) (Liu et al., 2020).

    The first omega of a stack is 1. The square of every other omega is the variance of omega x + Sublayer(x) in the
    sub-layer before, if x and Sublayer(x) are independent.

    Args:
      params: initial parameters, in which every omega is 1.
      sown: the variances of x and of Sublayer(x) in a pass with these parameters, by layer and residual connection.

    Raises:
      NotImplementedError: a layer has a residual connection that `RESIDUALS` does not name, so its order is unknown.
    """
    params = {**params}
    for stack in [name.removesuffix("_0") for name in sown if name.endswith("_0")]:
        square = 1.0
        for layer in itertools.takewhile(params.__contains__, (f"{stack}_{n}" for n in itertools.count())):
            residuals = {name: params[layer][name] for name in RESIDUALS if name in params[layer]}
            if unknown := [name for name, kept in sown[layer].items() if "variances" in kept and name not in RESIDUALS]:
                order = "name each where the layer applies it"
                raise NotImplementedError(f"RESIDUALS of {__file__} lacks {', '.join(unknown)} of {layer}: {order}")
            for name, residual in residuals.items():
                residuals[name] = residual | {"omega": jnp.full_like(residual["omega"], square**0.5)}
                [[of_x, of_sublayer]] = sown[layer][name]["variances"]
                square = square * of_x + of_sublayer
            params[layer] = params[layer] | residuals
    return params

"""The start of training: gains of Xavier's initial values, and the weight of residuals that goes with them."""

import dataclasses

from transformer_flax.model.config import EncoderConfig, TransformerConfig

FAIRSEQ_GAIN = 0.5**0.5  # of W^Q, W^K and W^V, as fairseq initialises the three as one matrix [d_model, 3 d_model]


def attention_gain(config: EncoderConfig) -> float:
    """The gain of the initial W^Q, W^K and W^V."""
    return FAIRSEQ_GAIN if config.start == "fairseq" else 1.0


def started(config: EncoderConfig, *, decoder: bool) -> tuple[EncoderConfig, float]:
    """The config of a stack's layers, and the factor alpha of their residuals: LayerNorm(alpha x + Sublayer(x)).

    DeepNorm (Wang et al., 2022, figure 2) multiplies the initial W^V, W^O, W_1 and W_2 by beta, as `branch_init` does.
    Both depend on the stack, and on whether a decoder follows the encoder.
    """
    if config.start != "deepnorm":
        return config, 1.0
    n = config.num_layers  # of the encoder as of the decoder
    if not isinstance(config, TransformerConfig):
        alpha, beta = (2 * n) ** 0.25, (8 * n) ** -0.25
    elif decoder:
        alpha, beta = (3 * n) ** 0.25, (12 * n) ** -0.25
    else:
        alpha, beta = 0.81 * n ** (5 / 16), 0.87 * n ** (-5 / 16)  # (N^4 M)^(1/16) with M = N
    return dataclasses.replace(config, branch_init=beta * config.branch_init), alpha

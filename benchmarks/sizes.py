"""Sizes of the model that the benchmarks measure."""

import dataclasses

from configs import base, big
from transformer_flax.training.config_checks import model_config

BASE = model_config(base.get_config(), 37_000)
SIZES = {
    "big": model_config(big.get_config(), 37_000),
    "base": BASE,
    "small": dataclasses.replace(
        BASE, vocab_size=8_000, num_layers=3, d_model=256, d_ff=1024, num_heads=4, d_k=64, d_v=64
    ),
    "tiny": dataclasses.replace(BASE, vocab_size=2_000, num_layers=3, d_model=64, d_ff=256, d_k=8, d_v=8),
}

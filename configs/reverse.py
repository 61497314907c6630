"""Reverses lines of random letters, from the last to the first; otherwise like configs/copy.py. No download.

    python train.py --config=configs/reverse.py
    python -m transformer_flax.sweep --config=configs/reverse.py --grid model.positions=sinusoidal,learned --seeds=3

docs/length.md explains how lengths are measured, and shows the results.
"""

from ml_collections import ConfigDict

from configs import copy


def get_config() -> ConfigDict:
    config = copy.get_config()
    config.name = "reverse"
    config.data.source = "reverse"
    return config

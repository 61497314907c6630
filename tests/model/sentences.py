"""Sentences for the tests of models, and their logits on them.

Letters of shapes: B batch, S source, T target, K hypotheses.
"""

import functools

import jax
import numpy as np

from tests.model.parameters import random_params
from transformer_flax.model.registry import make_model

# Two sources with three targets each, as a search with three hypotheses holds them.
B, K, S, T = 2, 3, 7, 6
SOURCES = np.array([[5, 9, 14, 3, 28, 11, 2], [17, 4, 8, 2, 0, 0, 0]])
SOURCE = np.repeat(SOURCES, K, axis=0)
TARGET = np.array(
    [
        [7, 24, 21, 13, 5, 2],
        [9, 3, 2, 0, 0, 0],
        [28, 28, 4, 16, 2, 0],
        [12, 3, 19, 25, 2, 0],
        [2, 0, 0, 0, 0, 0],
        [12, 3, 7, 6, 18, 2],
    ]
)


@functools.cache
def compiled(config):
    """The model as a program, of which all tests that give it the same shapes share one."""
    return jax.jit(make_model(config).apply)


def logits_of(config, source=SOURCE, target=TARGET, dropout_key=None):
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return np.asarray(compiled(config)({"params": random_params(config)}, source, target, rngs=rngs))

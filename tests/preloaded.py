"""Imports all that commands import; `tests/forked.py` forks them from here."""

import gc

import tests.forked  # noqa: F401  each child begins there
import transformer_flax.ablation.sweep
import transformer_flax.run
import transformer_flax.training.vectorized_seeds  # noqa: F401

gc.freeze()  # or each child would look through, and so copy, all of it

"""Imports all that commands import; `tests/forked.py` forks them from here."""

import gc

import tests.forked  # noqa: F401  each child begins there
import transformer_flax.ablation.report
import transformer_flax.ablation.sweep
import transformer_flax.run
import transformer_flax.training.vectorized_seeds  # noqa: F401
from transformer_flax.training import trainer

trainer.measured_flops = lambda dtype: 1e11  # measuring takes a second of each process that trains
gc.freeze()  # or each child would look through, and so copy, all of it

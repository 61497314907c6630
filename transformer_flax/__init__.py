"""The paper "Attention Is All You Need" as a research codebase, in JAX and Flax."""

import importlib

from transformer_flax.allocator import keep_memory

keep_memory()  # here, as it is of use before JAX is imported only

_PUBLIC = {"Run": "run", "restore": "run", "Sampling": "decoding.search"}


def __getattr__(name: str):
    """What notebooks need, loaded when it is asked for: JAX takes seconds, and `--help` should not."""
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"transformer_flax.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

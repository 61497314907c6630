"""The paper "Attention Is All You Need" as a research codebase, in JAX and Flax."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_flax.arguments import load_config
    from transformer_flax.decoding.settings import Sampling
    from transformer_flax.errors import UserError
    from transformer_flax.run import Run, restore

__version__ = "0.1.0"
_MODULES = {
    "Run": "run",
    "Sampling": "decoding.settings",
    "UserError": "errors",
    "load_config": "arguments",
    "restore": "run",
}
__all__ = ["Run", "Sampling", "UserError", "__version__", "load_config", "restore"]


if not TYPE_CHECKING:  # a type checker that sees this function takes any name for one of the package's

    def __getattr__(name: str):
        """Imports a public name on first use: JAX takes seconds to import, and `--help` should not need it."""
        if name in _MODULES:
            return getattr(importlib.import_module(f"transformer_flax.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

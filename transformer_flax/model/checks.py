"""What the configs of all kinds of models ask of their values."""

from collections.abc import Callable
from typing import Any

from transformer_flax.errors import UserError

DTYPES = ("float32", "bfloat16")
# Far beyond any use: what is larger is a mistake, and would be traced for hours before it fails.
MOST_LAYERS = 1_000
LARGEST = 1 << 24


def require(config: Any, name: str, is_valid: Callable[[Any], bool], requirement: str) -> None:
    """Raises:
    UserError: the value of that field is not valid, named as the field of `config.model` that it comes from.
    """
    value = getattr(config, name)
    if not is_valid(value):
        raise UserError(f"config.model.{name} is {value!r}; it must be {requirement}")


def require_size(config: Any, name: str, most: int = LARGEST, least: int = 1) -> None:
    require(config, name, lambda v: type(v) is int and least <= v <= most, f"a whole number from {least} to {most:,}")


def require_rate(config: Any, name: str) -> None:
    require(config, name, lambda v: type(v) in (int, float) and 0 <= v < 1, "a number from 0 to below 1")


def require_switch(config: Any, name: str) -> None:
    require(config, name, lambda v: type(v) is bool, "True or False")


def require_one_of(config: Any, name: str, known: tuple[str, ...]) -> None:
    require(config, name, lambda v: v in known, f"one of {', '.join(known)}")

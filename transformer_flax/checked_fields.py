"""Fields of dataclasses that state which values they allow, so a new field of a config is one line."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

from transformer_flax.errors import UserError

LARGEST_SIZE = 1 << 24  # larger values are typing errors
TYPES: dict[Any, str] = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}


def checked(is_valid: Callable[[Any], bool], requirement: str, **default: Any) -> Any:
    """Returns a dataclass field whose values must satisfy `is_valid`. The type of a value is checked first."""
    return dataclasses.field(metadata={"is_valid": is_valid, "requirement": requirement}, **default)


def size(*, least: int = 1, most: int = LARGEST_SIZE, **default: Any) -> Any:
    return checked(lambda v: least <= v <= most, f"a whole number from {least} to {most:,}", **default)


def at_least(least: float, **default: Any) -> Any:
    return checked(lambda v: v >= least, f"at least {least}", **default)


def rate(**default: Any) -> Any:
    return checked(lambda v: 0 <= v < 1, "a number from 0 to below 1", **default)


def positive(**default: Any) -> Any:
    return checked(lambda v: 0 < v < math.inf, "a number above 0", **default)


def one_of(known: tuple[str, ...], **default: Any) -> Any:
    return checked(lambda v: v in known, f"one of {', '.join(known)}", **default)


def requirement(field: dataclasses.Field, value: Any) -> str | None:
    """Returns the requirement that a field's value violates: its type, or that of `checked`. None: no violation."""
    wanted: Any = field.type
    if wanted in TYPES and type(value) is not wanted and not (wanted is float and type(value) is int):
        return TYPES[wanted]
    return None if field.metadata.get("is_valid", lambda v: True)(value) else field.metadata["requirement"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedConfig:
    """A dataclass that checks its fields, such as a section of the config."""

    section: ClassVar[str] = ""  # its name in the run's config, for messages

    def __post_init__(self):
        for field in dataclasses.fields(self):
            must = requirement(field, getattr(self, field.name))
            self.require(field.name, must is None, str(must))

    def require(self, name: str, is_valid: bool, must: str) -> None:
        """Checks a condition between fields, `is_valid`. A UserError names the field and what it `must` be."""
        if not is_valid:
            where = f"config.{self.section}." if self.section else ""
            raise UserError(f"{where}{name} is {getattr(self, name)!r}; it must be {must}")

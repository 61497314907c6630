"""How word vectors are trained."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from transformer_flax.errors import UserError

KINDS = ("skipgram", "cbow")
SIDES = ("both", "interleaved", "source", "target")


@dataclasses.dataclass(frozen=True)
class VectorConfig:
    """Sizes and choices of the training; `configs/vectors.py` explains each.

    Raises:
      UserError: a value that cannot be, named as the config field it comes from.
    """

    kind: str
    d_model: int
    window: int
    negatives: int
    shared_negatives: int
    noise_power: float
    subsample: float
    sides: str
    epochs: int
    rows_per_batch: int
    learning_rate: float

    def __post_init__(self):
        self._require("kind", lambda v: v in KINDS, f"one of {', '.join(KINDS)}")
        self._require("sides", lambda v: v in SIDES, f"one of {', '.join(SIDES)}")
        for name in ("d_model", "window", "negatives", "shared_negatives", "epochs", "rows_per_batch"):
            self._require(name, lambda v: type(v) is int and 1 <= v <= 1 << 20, f"a whole number from 1 to {1 << 20:,}")
        self._require("noise_power", lambda v: type(v) in (int, float) and 0 <= v <= 1, "from 0 to 1")
        self._require("subsample", lambda v: type(v) in (int, float) and 0 <= v < 1, "0, or below 1")
        self._require("learning_rate", lambda v: type(v) in (int, float) and 0 < v < math.inf, "above 0")

    def _require(self, name: str, is_valid: Callable[[Any], bool], requirement: str) -> None:
        value = getattr(self, name)
        if not is_valid(value):
            raise UserError(f"config.vectors.{name} is {value!r}; it must be {requirement}")

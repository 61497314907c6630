"""What a Transformer is made of, one row of table 3, and what its encoder alone is."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from transformer_flax.errors import UserError

SINUSOIDS = ("sinusoidal", "sinusoidal_concatenated")  # added to embeddings, as learned positions are
DISTANCES = ("relative", "rotary")  # told to self-attention instead
POSITIONS = (*SINUSOIDS, "learned", *DISTANCES)
COMPATIBILITIES = ("scaled_dot", "dot", "additive")
REMAT = ("none", "products", "layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and choices of an encoder, in the paper's symbols; `configs/base.py` explains each.

    A field with a default came after runs had been saved: the default is what these did without it.

    Raises:
      UserError: a value that none can have, named as the config field it comes from.
    """

    vocab_size: int  # V
    num_layers: int  # N
    d_model: int
    d_ff: int
    num_heads: int  # h
    d_k: int
    d_v: int
    dropout: float
    positions: str
    max_length: int
    attention_dropout: float
    ffn_dropout: float
    pre_norm: bool
    attention_bias: bool
    scan_layers: bool
    remat: str
    dtype: str
    compatibility: str = "scaled_dot"
    clip_distance: int = 16
    neighbourhood: int = 0  # r
    branch_init: float = 1.0

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "d_ff", "num_heads", "d_k", "d_v", "max_length", "clip_distance"):
            require_size(self, name)
        require_size(self, "num_layers", MOST_LAYERS)
        require_size(self, "neighbourhood", least=0)
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            require_rate(self, name)
        for name in ("pre_norm", "attention_bias", "scan_layers"):
            require_switch(self, name)
        require_one_of(self, "positions", POSITIONS)
        require_one_of(self, "compatibility", COMPATIBILITIES)
        require_one_of(self, "remat", REMAT)
        require_one_of(self, "dtype", DTYPES)
        require(self, "branch_init", lambda v: type(v) in (int, float) and 0 < v < math.inf, "a number above 0")
        if self.positions in SINUSOIDS:
            require(self, "d_model", lambda v: v % 2 == 0, "even: sinusoids come in pairs of a sine and a cosine")
        if self.positions == "rotary":
            require(self, "d_k", lambda v: v % 2 == 0, "even: rotary positions turn features in pairs")
            require(
                self,
                "compatibility",
                lambda v: v != "additive",
                "scaled_dot or dot with rotary positions, as products alone tell how far apart turned vectors stand",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(EncoderConfig):
    """Sizes and choices of the whole model."""

    tie_embeddings: bool

    def __post_init__(self):
        super().__post_init__()
        require_switch(self, "tie_embeddings")


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

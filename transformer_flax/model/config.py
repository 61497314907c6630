"""What a Transformer is made of, one row of table 3, and what its encoder alone is."""

import dataclasses
from collections.abc import Callable
from typing import Any

from transformer_flax.errors import UserError

SINUSOIDS = ("sinusoidal", "sinusoidal_concatenated")  # added to embeddings, as learned positions are
DISTANCES = ("relative", "rotary")  # told to self-attention instead
POSITIONS = (*SINUSOIDS, "learned", *DISTANCES)
COMPATIBILITIES = ("scaled_dot", "dot", "additive")
DTYPES = ("float32", "bfloat16")
REMAT = ("none", "products", "layers")
# Far beyond any use: what is larger is a mistake, and would be traced for hours before it fails.
MOST_LAYERS = 1_000
LARGEST = 1 << 24


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Sizes and choices of an encoder, in the paper's symbols; `configs/base.py` explains each.

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
    clip_distance: int
    neighbourhood: int  # r
    compatibility: str
    attention_dropout: float
    ffn_dropout: float
    pre_norm: bool
    attention_bias: bool
    scan_layers: bool
    remat: str
    dtype: str

    def __post_init__(self):
        for name in (
            "vocab_size", "num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v", "max_length", "clip_distance"
        ):  # fmt: skip
            most = MOST_LAYERS if name == "num_layers" else LARGEST
            require(self, name, lambda v, m=most: type(v) is int and 1 <= v <= m, f"a whole number from 1 to {most:,}")
        require(
            self,
            "neighbourhood",
            lambda v: type(v) is int and 0 <= v <= LARGEST,
            f"a whole number from 0 to {LARGEST:,}",
        )
        for name in ("dropout", "attention_dropout", "ffn_dropout"):
            require(self, name, lambda v: type(v) in (int, float) and 0 <= v < 1, "a number from 0 to below 1")
        for name in ("pre_norm", "attention_bias", "scan_layers"):
            require(self, name, lambda v: type(v) is bool, "True or False")
        require(self, "positions", lambda v: v in POSITIONS, f"one of {', '.join(POSITIONS)}")
        require(self, "compatibility", lambda v: v in COMPATIBILITIES, f"one of {', '.join(COMPATIBILITIES)}")
        require(self, "remat", lambda v: v in REMAT, f"one of {', '.join(REMAT)}")
        require(self, "dtype", lambda v: v in DTYPES, f"one of {', '.join(DTYPES)}")
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


@dataclasses.dataclass(frozen=True)
class TransformerConfig(EncoderConfig):
    """Sizes and choices of the whole model."""

    tie_embeddings: bool

    def __post_init__(self):
        super().__post_init__()
        require(self, "tie_embeddings", lambda v: type(v) is bool, "True or False")


def require(config: Any, name: str, is_valid: Callable[[Any], bool], requirement: str) -> None:
    """Raises:
    UserError: a field of a model's config has a value that it cannot have.
    """
    value = getattr(config, name)
    if not is_valid(value):
        raise UserError(f"config.model.{name} is {value!r}; it must be {requirement}")

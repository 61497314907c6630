"""What a recurrent translator is made of."""

import dataclasses

from transformer_flax.model.checks import (
    DTYPES,
    MOST_LAYERS,
    require,
    require_one_of,
    require_rate,
    require_size,
    require_switch,
)

CELLS = ("gru", "lstm")
ATTENTION = ("additive", "dot", "scaled", "none")


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Sizes and choices of the model; `configs/recurrent.py` explains each.

    Raises:
      UserError: a value that no recurrent translator can have, named as the config field it comes from.
    """

    vocab_size: int  # V
    num_layers: int  # N
    d_model: int
    cell: str
    attention: str
    dropout: float
    tie_embeddings: bool
    dtype: str

    def __post_init__(self):
        require_size(self, "vocab_size")
        require_size(self, "num_layers", MOST_LAYERS)
        require_size(self, "d_model")
        require(self, "d_model", lambda v: v % 2 == 0, "even: each direction of the encoder has a half of it")
        require_one_of(self, "cell", CELLS)
        require_one_of(self, "attention", ATTENTION)
        require_rate(self, "dropout")
        require_switch(self, "tie_embeddings")
        require_one_of(self, "dtype", DTYPES)

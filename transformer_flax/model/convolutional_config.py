"""What a convolutional translator is made of."""

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

POSITIONS = ("learned", "sinusoidal")


@dataclasses.dataclass(frozen=True)
class ConvolutionalConfig:
    """Sizes and choices of the model; `configs/convolutional.py` explains each.

    Raises:
      UserError: a value that no convolutional translator can have, named as the config field it comes from.
    """

    vocab_size: int  # V
    num_layers: int  # N
    d_model: int
    kernel_width: int
    positions: str
    max_length: int
    dropout: float
    tie_embeddings: bool
    dtype: str

    def __post_init__(self):
        require_size(self, "vocab_size")
        require_size(self, "num_layers", MOST_LAYERS)
        require_size(self, "d_model")
        require_size(self, "kernel_width")
        require(self, "kernel_width", lambda v: v % 2 == 1, "odd: the encoder sees as many words before as behind")
        require_one_of(self, "positions", POSITIONS)
        require_size(self, "max_length")
        require_rate(self, "dropout")
        require_switch(self, "tie_embeddings")
        require_one_of(self, "dtype", DTYPES)
        if self.positions == "sinusoidal":
            require(self, "d_model", lambda v: v % 2 == 0, "even: sinusoids come in pairs of a sine and a cosine")

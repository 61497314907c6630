"""Small rivals of the Transformer, of every kind."""

import dataclasses

from transformer_flax.relatives.convolutional import ConvolutionalConfig
from transformer_flax.relatives.recurrent import RecurrentConfig

RECURRENT = RecurrentConfig(
    vocab_size=29,
    num_layers=2,
    d_model=16,
    cell="gru",
    attention="additive",
    dropout=0.1,
    tie_embeddings=True,
    dtype="float32",
)
CONVOLUTIONAL = ConvolutionalConfig(
    vocab_size=29,
    num_layers=2,
    d_model=14,
    kernel_width=3,
    max_length=32,
    dropout=0.1,
    tie_embeddings=True,
    dtype="float32",
)
RIVALS = {
    "recurrent": RECURRENT,
    "lstm, scaled, untied": dataclasses.replace(
        RECURRENT, cell="lstm", attention="scaled_dot", tie_embeddings=False, num_layers=1
    ),
    "lstm, none": dataclasses.replace(RECURRENT, cell="lstm", attention="none"),
    "convolutional": CONVOLUTIONAL,
    "wide, untied": dataclasses.replace(CONVOLUTIONAL, kernel_width=5, num_layers=1, tie_embeddings=False),
}

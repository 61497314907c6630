"""Relatives of the Transformer. Importing this package registers its kinds of models (`model.registry`).

Word vectors (`word_vectors`, `embeddings`) are trained on their own and are not a kind.
"""

from transformer_flax.relatives import classifier, convolutional, recurrent  # noqa: F401

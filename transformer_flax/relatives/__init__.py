"""Relatives of the Transformer. Importing this package registers its kinds of models (`model.registry`).

Word vectors (`word_vectors`, `vector_files`) are trained separately and are not a kind of model.
"""

from transformer_flax.relatives import classifier, convolutional, recurrent  # noqa: F401

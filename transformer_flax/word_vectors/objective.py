"""What word vectors are trained for: skip-gram or CBOW with negative sampling (Mikolov et al., 2013).

Text is cut into rows, and every word of a row, whether in the middle of a window or in that of others, meets the row's
other words and the row's noise in matrix products. Words in different sentences do not see each other.

Letters of shapes: R rows, T words in a row (C where they are contexts), M words of noise for a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid


def windows(sentences: jax.Array | np.ndarray, reach: jax.Array | np.ndarray) -> jax.Array:
    """Which words are contexts of which: [R, T, C], 1 or 0.

    Args:
      sentences: [R, T], the number of the sentence that each word stands in; -1 for padding.
      reach: [R, T], how many words to each side it looks.
    """
    place = jnp.arange(sentences.shape[1])
    distance = jnp.abs(place[:, None] - place)
    same = (sentences[:, :, None] == sentences[:, None, :]) & (sentences >= 0)[:, :, None]
    return (same & (distance > 0) & (distance <= reach[:, :, None])).astype(jnp.float32)


def skipgram_loss(v: jax.Array, u: jax.Array, noise: jax.Array, window: jax.Array, negatives: float) -> jax.Array:
    """Each word w predicts every context c of its window, against k words n of noise:

        -log sigma(u_c . v_w) - sum_{i=1..k} log sigma(-u_{n_i} . v_w), summed over all (w, c)

    Noise is shared: each of a row's M words of noise stands against all pairs (w, c) of the row and weighs k / M, which
    is the same on average.

    Args:
      v, u: [R, T, d_model], the words' own vectors, and theirs as contexts.
      noise: [R, M, d_model], vectors of noise as contexts.
      window: [R, T, C].
      negatives: k.
    """
    pairs = window.sum(-1)  # [R, T]
    right = log_sigmoid(jnp.einsum("rtd,rcd->rtc", v, u))
    wrong = log_sigmoid(-jnp.einsum("rtd,rmd->rtm", v, noise))
    return -jnp.sum(window * right) - negatives / noise.shape[1] * jnp.sum(pairs[:, :, None] * wrong)


def cbow_loss(v: jax.Array, u: jax.Array, noise: jax.Array, window: jax.Array, negatives: float) -> jax.Array:
    """The mean h of a window predicts the word w in its middle, against k words n of noise:

        -log sigma(u_w . h) - sum_{i=1..k} log sigma(-u_{n_i} . h), summed over all w that have a context

    Arguments, and the sharing of noise, as of `skipgram_loss`.
    """
    contexts = window.sum(-1, keepdims=True)  # [R, T, 1]
    h = jnp.einsum("rtc,rcd->rtd", window / jnp.maximum(contexts, 1), v)
    right = log_sigmoid(jnp.sum(u * h, -1, keepdims=True))
    wrong = log_sigmoid(-jnp.einsum("rtd,rmd->rtm", h, noise))
    return -jnp.sum((contexts > 0) * (right + negatives / noise.shape[1] * wrong.sum(-1, keepdims=True)))


LOSSES = {"skipgram": skipgram_loss, "cbow": cbow_loss}

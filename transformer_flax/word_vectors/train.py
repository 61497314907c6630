"""The training of word vectors: Adagrad on the vectors that a batch touches, and on no others."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_flax.data.corpus import Sentences
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.word_vectors.config import VectorConfig
from transformer_flax.word_vectors.objective import LOSSES, windows
from transformer_flax.word_vectors.rows import Rows, Text, count_words
from transformer_flax.word_vectors.vectors import Vectors, count_whole_words

READ = 100  # steps, after which the host waits for their losses
LEAST = 1e-10  # of the sum of squares that Adagrad divides by


class Tables(NamedTuple):
    """What is trained."""

    vectors: jax.Array  # [2 V, d_model], each word's own, then each word's as a context
    squares: jax.Array  # [2 V], of the gradients so far: the sum of each vector's mean


class Touched(NamedTuple):
    """A batch and the vectors that it touches, as many as there is room for at most."""

    places: np.ndarray  # int32, ascending, in the tables; from 2 V on where there are fewer
    v: np.ndarray  # int32 [R, T], where in `places` each word's own vector is
    u: np.ndarray  # int32 [R, T], and its vector as a context
    noise: np.ndarray  # int32 [R, M]
    sentences: np.ndarray  # int32 [R, T]
    reach: np.ndarray  # int32 [R, T]


def touch(rows: Rows, vocab_size: int) -> Touched:
    """Finds the vectors of a batch."""
    asked = [rows.words, rows.words + vocab_size, rows.noise + vocab_size]
    sizes = [part.size for part in asked]
    places, found = np.unique(np.concatenate([part.ravel() for part in asked]), return_inverse=True)
    room = np.concatenate([places, np.arange(sum(sizes) - len(places)) + 2 * vocab_size]).astype(np.int32)
    parts = np.split(found.astype(np.int32), np.cumsum(sizes)[:-1])
    v, u, noise = (part.reshape(like.shape) for part, like in zip(parts, asked, strict=True))
    return Touched(room, v, u, noise, rows.sentences, rows.reach)


def gradient(vectors: jax.Array, batch: Touched, kind: str, negatives: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss of a batch, the words that have a context, and the gradient of the vectors at its places."""
    window = windows(batch.sentences, batch.reach)

    def loss(touched: jax.Array) -> jax.Array:
        return LOSSES[kind](touched[batch.v], touched[batch.u], touched[batch.noise], window, negatives)

    value, grads = jax.value_and_grad(loss)(vectors.at[batch.places].get(mode="fill", fill_value=0.0))
    return value, jnp.sum(window.any(-1)), grads


@functools.partial(jax.jit, static_argnames=("kind", "negatives"), donate_argnames="tables")
def update(
    tables: Tables, batch: Touched, rate: jax.Array, *, kind: str, negatives: float
) -> tuple[Tables, jax.Array, jax.Array]:
    """One step of Adagrad with one rate for each vector: the tables after it, the loss and the words it is of."""
    loss, count, grads = gradient(tables.vectors, batch, kind, negatives)
    own = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    squares = tables.squares.at[batch.places].get(mode="fill", fill_value=1.0) + jnp.mean(grads**2, axis=-1)
    steps = rate * grads / jnp.sqrt(squares + LEAST)[:, None]
    vectors = tables.vectors.at[batch.places].add(-steps, **own)
    return Tables(vectors, tables.squares.at[batch.places].set(squares, **own)), loss, count


def train_vectors(
    sides: Sequence[Sentences],
    tokenizer: Tokenizer,
    config: VectorConfig,
    seed: int,
    *,
    progress: Callable[[float, float], None] = lambda epochs, loss: None,
) -> Vectors:
    """Vectors of the pieces of a text.

    Args:
      sides: its sentences, one language or both.
      tokenizer: that made them.
      config: of the training.
      seed: rules all that is random; the same gives the same vectors.
      progress: called after some steps with the epochs that are done and the loss of a word since the last time.

    Raises:
      UserError: there is no text, or the vectors are not finite.
    """
    counts = count_words(sides, tokenizer.vocab_size)
    if not counts.any():
        raise UserError("there are no words in the text to learn vectors of")
    rng = np.random.default_rng(seed)
    shape = (tokenizer.vocab_size, config.d_model)
    start = np.concatenate([rng.uniform(-0.5, 0.5, shape) / config.d_model, np.zeros(shape)])
    tables = Tables(jnp.asarray(start, jnp.float32), jnp.zeros(2 * tokenizer.vocab_size, jnp.float32))
    text = Text(sides, counts, config, seed)
    for epoch in range(config.epochs):
        batches = text.epoch(epoch)
        while some := list(itertools.islice(batches, READ)):
            losses = []
            for rows in some:
                left = 1 - (epoch + rows.done) / config.epochs
                tables, *loss = update(
                    tables,
                    touch(rows, tokenizer.vocab_size),
                    np.float32(config.learning_rate * left),
                    kind=config.kind,
                    negatives=config.negatives,
                )
                losses.append(loss)
            total, words = np.sum(jax.device_get(losses), axis=0)
            progress(epoch + some[-1].done, total / max(words, 1))
    table = np.array(tables.vectors[: tokenizer.vocab_size])
    if not np.isfinite(table).all():
        raise UserError(
            f"the vectors are not finite: lower config.vectors.learning_rate, which is {config.learning_rate}"
        )
    return Vectors.make(tokenizer, table, counts, count_whole_words(sides, tokenizer), rng)

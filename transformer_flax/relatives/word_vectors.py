"""How word vectors are trained."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid

from transformer_flax.data.corpus import BLOCK, Sentences, count, ranges
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.relatives.embeddings import Vectors, count_whole_words
from transformer_flax.special_tokens import NUM_SPECIAL, PAD_ID

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


ROW = 64  # words: more, and most products would be of words too far from each other; fewer, and its ends cut windows


@dataclasses.dataclass(frozen=True)
class Rows:
    """A batch: what is in R rows of ROW words, all int32."""

    words: np.ndarray  # [R, ROW]
    sentences: np.ndarray  # [R, ROW], which of them stand in the same one; -1 for padding
    reach: np.ndarray  # [R, ROW], of the window of each
    noise: np.ndarray  # [R, M]
    done: float  # share of the epoch behind it


def count_words(sides: Sequence[Sentences], vocab_size: int) -> np.ndarray:
    """How often each word is there, special ones left out: int64 [V]."""
    counts = np.sum([count(side.ids, vocab_size) for side in sides], axis=0)
    counts[:NUM_SPECIAL] = 0
    return counts


class Text:
    """Sentences of one or two languages as an endless supply of rows.

    `epoch(k)` is a pure function of (sentences, config, seed, k). Frequent words are left out at random, and what is
    left moves together, so windows reach farther (Mikolov et al., 2013). Interleaved, the two sentences of a pair are
    merged into one by how far along each word stands, so that windows see both languages (Vulic and Moens, 2015).
    """

    def __init__(self, sides: Sequence[Sentences], counts: np.ndarray, config: VectorConfig, seed: int):
        self._sides, self._config, self._seed = sides, config, seed
        # Of each side, the number of its first sentence; pairs that are merged have one number.
        self._firsts = [0, 0, len(sides[0])] if config.sides == "interleaved" else np.cumsum([0, *map(len, sides)])
        frequencies = np.maximum(counts, 1) / counts.sum()
        self._kept = np.sqrt(config.subsample / frequencies) if config.subsample else np.ones(len(counts))
        self._kept[:NUM_SPECIAL] = 0.0
        noise = counts**config.noise_power * (counts > 0)
        self._noise = np.cumsum(noise / noise.sum())

    def epoch(self, k: int) -> Iterator[Rows]:
        """All sentences once, shuffled."""
        rng = np.random.default_rng((self._seed, k))
        order = rng.permutation(self._firsts[-1])
        for start in range(0, len(order), BLOCK):
            words, sentences = self._take(order[start : start + BLOCK])
            yield from self._rows(rng, words, sentences, start, len(order))

    def _take(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The words of these sentences, and the number of the sentence that each stands in."""
        words, sentences, places = [], [], []
        for side, first in zip(self._sides, self._firsts, strict=False):
            own = chosen[(chosen >= first) & (chosen < first + len(side))]
            lengths = side.lengths_of(own - first)
            words.append(side.tokens(own - first, lengths).astype(np.int32))
            sentences.append(np.repeat(own, lengths))
            places.append(ranges(np.zeros_like(lengths), lengths) / np.repeat(lengths, lengths))
        words, sentences = np.concatenate(words), np.concatenate(sentences)
        if self._config.sides != "interleaved":
            return words, sentences
        rank = np.empty(len(self._sides[0]), np.int64)
        rank[chosen] = np.arange(len(chosen))
        merged = np.lexsort((np.concatenate(places), rank[sentences]))
        return words[merged], sentences[merged]

    def _rows(self, rng, words: np.ndarray, sentences: np.ndarray, start: int, total: int) -> Iterator[Rows]:
        """Batches of a block of sentences, which begins at `start` of `total`; the last one is filled up."""
        kept = rng.random(len(words)) < self._kept[words]
        words, sentences = words[kept], sentences[kept]
        shape = (-1, self._config.rows_per_batch, ROW)
        missing = -len(words) % (self._config.rows_per_batch * ROW)
        words = np.pad(words, (0, missing), constant_values=PAD_ID).reshape(-1, ROW)
        sentences = np.pad(sentences.astype(np.int32), (0, missing), constant_values=-1).reshape(-1, ROW)
        rows = rng.permutation(len(words))  # or all of one language would come before the other
        words, sentences = words[rows].reshape(shape), sentences[rows].reshape(shape)
        block = min(total - start, BLOCK)
        for i in range(len(words)):
            reach = rng.integers(1, self._config.window, words[i].shape, np.int32, endpoint=True)
            drawn = rng.random((len(words[i]), self._config.shared_negatives))
            noise = np.minimum(np.searchsorted(self._noise, drawn, side="right"), len(self._noise) - 1)
            done = (start + block * i / len(words)) / total
            yield Rows(words[i], sentences[i], reach, noise.astype(np.int32), done)


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

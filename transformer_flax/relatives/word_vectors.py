"""Training of word vectors: skip-gram and CBOW with negative sampling (Mikolov et al., 2013)."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid

from transformer_flax.checked_fields import CheckedConfig, checked, one_of, positive, rate, size
from transformer_flax.data.corpus import Sentences, blocks, count, ranges
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.relatives.vector_files import Vectors, count_whole_words
from transformer_flax.special_tokens import NUM_SPECIAL, PAD_ID

SIDES = ("both", "interleaved", "source", "target")
ROW = 64  # words. In longer rows, most products are of distant words. In shorter rows, the ends cut more windows.
READ_EVERY = 100  # steps between reads of the losses; the host waits at each read
EPSILON = 1e-10  # added to the sum of squares that Adagrad divides by


def windows(sentences: jax.Array | np.ndarray, reach: jax.Array | np.ndarray) -> jax.Array:
    """Returns 1 where word c is a context of word t, else 0: sentences [R, T], reach [R, T] -> [R, T, C].

    `sentences` has the number of each word's sentence; -1 is padding. `reach` says how many words on each side of a
    word are its context.
    """
    place = jnp.arange(sentences.shape[1])
    distance = jnp.abs(place[:, None] - place)
    same = (sentences[:, :, None] == sentences[:, None, :]) & (sentences >= 0)[:, :, None]
    return (same & (distance > 0) & (distance <= reach[:, :, None])).astype(jnp.float32)


def skipgram_loss(v: jax.Array, u: jax.Array, noise: jax.Array, window: jax.Array, negatives: float) -> jax.Array:
    """Computes the loss of skip-gram: each word w predicts every context c of its window, against k noise words n.

        -log sigma(u_c . v_w) - sum_{i=1..k} log sigma(-u_{n_i} . v_w), summed over all (w, c)

    v [R, T, d_model], u [R, T, d_model], noise [R, M, d_model], window [R, T, C] -> scalar. v has the vectors of the
    words, u their vectors as contexts, and noise the vectors of the noise words as contexts. `negatives` is k.

    Noise words are shared: each of a row's M noise words counts for all pairs (w, c) of the row, with weight k / M. On
    average, this gives the same loss.
    """
    pairs = window.sum(-1)  # [R, T]
    right = log_sigmoid(jnp.einsum("rtd,rcd->rtc", v, u))
    wrong = log_sigmoid(-jnp.einsum("rtd,rmd->rtm", v, noise))
    return -jnp.sum(window * right) - negatives / noise.shape[1] * jnp.sum(pairs[:, :, None] * wrong)


def cbow_loss(v: jax.Array, u: jax.Array, noise: jax.Array, window: jax.Array, negatives: float) -> jax.Array:
    """Computes the loss of CBOW: the mean h of a window predicts the word w in its centre, against k noise words n.

        -log sigma(u_w . h) - sum_{i=1..k} log sigma(-u_{n_i} . h), summed over all w that have a context

    The arguments and the shared noise are those of `skipgram_loss`.
    """
    contexts = window.sum(-1, keepdims=True)  # [R, T, 1]
    h = jnp.einsum("rtc,rcd->rtd", window / jnp.maximum(contexts, 1), v)
    right = log_sigmoid(jnp.sum(u * h, -1, keepdims=True))
    wrong = log_sigmoid(-jnp.einsum("rtd,rmd->rtm", h, noise))
    return -jnp.sum((contexts > 0) * (right + negatives / noise.shape[1] * wrong.sum(-1, keepdims=True)))


LOSSES = {"skipgram": skipgram_loss, "cbow": cbow_loss}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorConfig(CheckedConfig):
    """Sizes and choices of the training. `configs/vectors.py` explains each field."""

    section: ClassVar[str] = "vectors"

    kind: str = one_of(tuple(LOSSES))
    d_model: int = size()
    window: int = size()
    negatives: int = size()
    shared_negatives: int = size()
    noise_power: float = checked(lambda v: 0 <= v <= 1, "a number from 0 to 1")
    subsample: float = rate()
    sides: str = one_of(SIDES)
    epochs: int = size()
    rows_per_batch: int = size()
    learning_rate: float = positive()


@dataclasses.dataclass(frozen=True)
class Rows:
    """A batch of R rows of ROW words; all arrays are int32."""

    words: np.ndarray  # [R, ROW]
    sentences: np.ndarray  # [R, ROW], the number of each word's sentence; -1 for padding
    reach: np.ndarray  # [R, ROW], words on each side that a word's window has
    noise: np.ndarray  # [R, M]
    done: float  # share of the epoch before this batch


def count_words(sides: Sequence[Sentences], vocab_size: int) -> np.ndarray:
    """Counts the occurrences of each word; special tokens count 0: int64 [V]."""
    counts = np.sum([count(side.ids, vocab_size) for side in sides], axis=0)
    counts[:NUM_SPECIAL] = 0
    return counts


class Text:
    """Sentences of one or two languages as rows for training.

    `epoch(k)` is a pure function of (sentences, config, seed, k). Frequent words are left out at random before windows
    are formed, so windows reach farther (Mikolov et al., 2013). With sides "interleaved", the two sentences of a pair
    are merged by the relative position of their words, so windows see both languages (Vulic and Moens, 2015).
    """

    def __init__(self, sides: Sequence[Sentences], counts: np.ndarray, config: VectorConfig, seed: int):
        self._config, self._seed = config, seed
        # Each side with the number of its first sentence. Merged pairs have one number.
        firsts = [0, 0] if config.sides == "interleaved" else np.cumsum([0, *map(len, sides[:-1])])
        self._sides, self._count = list(zip(firsts, sides, strict=True)), int(firsts[-1]) + len(sides[-1])
        frequencies = np.maximum(counts, 1) / counts.sum()
        self._kept = np.sqrt(config.subsample / frequencies) if config.subsample else np.ones(len(counts))
        self._kept[:NUM_SPECIAL] = 0.0
        noise = counts**config.noise_power * (counts > 0)
        self._noise = np.cumsum(noise / noise.sum())

    def epoch(self, k: int) -> Iterator[Rows]:
        """Yields the batches of one epoch: all sentences once, shuffled."""
        rng = np.random.default_rng((self._seed, k))
        order = rng.permutation(self._count)
        for block in blocks(self._count):
            yield from self._rows(rng, *self._take(order[block]), block)

    def _take(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the words of these sentences, and the number of each word's sentence."""
        words, sentences, places = [], [], []
        for first, side in self._sides:
            own = chosen[(chosen >= first) & (chosen < first + len(side))]
            lengths = side.lengths_of(own - first)
            words.append(side.tokens(own - first, lengths).astype(np.int32))
            sentences.append(np.repeat(own, lengths))
            places.append(ranges(np.zeros_like(lengths), lengths) / np.repeat(lengths, lengths))
        words, sentences = np.concatenate(words), np.concatenate(sentences)
        if self._config.sides != "interleaved":
            return words, sentences
        rank = np.empty(self._count, np.int64)
        rank[chosen] = np.arange(len(chosen))
        merged = np.lexsort((np.concatenate(places), rank[sentences]))
        return words[merged], sentences[merged]

    def _rows(self, rng, words: np.ndarray, sentences: np.ndarray, block: slice) -> Iterator[Rows]:
        """Yields the batches of a block of an epoch's sentences. The last batch is padded."""
        kept = rng.random(len(words)) < self._kept[words]
        words, sentences = words[kept], sentences[kept]
        shape = (-1, self._config.rows_per_batch, ROW)
        missing = -len(words) % (self._config.rows_per_batch * ROW)
        words = np.pad(words, (0, missing), constant_values=PAD_ID).reshape(-1, ROW)
        sentences = np.pad(sentences.astype(np.int32), (0, missing), constant_values=-1).reshape(-1, ROW)
        rows = rng.permutation(len(words))  # without this, all rows of one language would come before the other
        words, sentences = words[rows].reshape(shape), sentences[rows].reshape(shape)
        for i in range(len(words)):
            reach = rng.integers(1, self._config.window, words[i].shape, np.int32, endpoint=True)
            drawn = rng.random((len(words[i]), self._config.shared_negatives))
            noise = np.minimum(np.searchsorted(self._noise, drawn, side="right"), len(self._noise) - 1)
            done = (block.start + (block.stop - block.start) * i / len(words)) / self._count
            yield Rows(words[i], sentences[i], reach, noise.astype(np.int32), done)


class Tables(NamedTuple):
    """The state of training."""

    vectors: jax.Array  # [2 V, d_model], the vectors of all words, then their vectors as contexts
    squares: jax.Array  # [2 V], the mean square of each vector's gradient, summed over steps


class Touched(NamedTuple):
    """A batch and the vectors that it touches."""

    places: np.ndarray  # int32, the rows of the tables, ascending, filled up with rows from 2 V on, which do not exist
    v: np.ndarray  # int32 [R, T], index in `places` of each word's vector
    u: np.ndarray  # int32 [R, T], index in `places` of each word's vector as a context
    noise: np.ndarray  # int32 [R, M], index in `places` of each noise word's vector as a context
    sentences: np.ndarray  # int32 [R, T]
    reach: np.ndarray  # int32 [R, T]


def touch(rows: Rows, vocab_size: int) -> Touched:
    """Finds the vectors that a batch touches."""
    asked = np.concatenate([rows.words, rows.words + vocab_size, rows.noise + vocab_size], axis=1)
    places, found = np.unique(asked, return_inverse=True)
    room = np.concatenate([places, np.arange(asked.size - len(places)) + 2 * vocab_size]).astype(np.int32)
    length = rows.words.shape[1]
    v, u, noise = np.split(found.astype(np.int32), [length, 2 * length], axis=1)
    return Touched(room, v, u, noise, rows.sentences, rows.reach)


def gradient(vectors: jax.Array, batch: Touched, kind: str, negatives: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a batch's loss, its number of words with a context, and the gradient of the vectors at its places."""
    window = windows(batch.sentences, batch.reach)

    def loss(touched: jax.Array) -> jax.Array:
        return LOSSES[kind](touched[batch.v], touched[batch.u], touched[batch.noise], window, negatives)

    value, grads = jax.value_and_grad(loss)(vectors.at[batch.places].get(mode="fill", fill_value=0.0))
    return value, jnp.sum(window.any(-1)), grads


@functools.partial(jax.jit, static_argnames=("kind", "negatives"), donate_argnames="tables")
def update(
    tables: Tables, batch: Touched, rate: jax.Array, *, kind: str, negatives: float
) -> tuple[Tables, jax.Array, jax.Array]:
    """Takes one step of Adagrad with one rate per vector. Returns the new tables, the loss and its number of words."""
    loss, count, grads = gradient(tables.vectors, batch, kind, negatives)
    own = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
    squares = tables.squares.at[batch.places].get(mode="fill", fill_value=1.0) + jnp.mean(grads**2, axis=-1)
    steps = rate * grads / jnp.sqrt(squares + EPSILON)[:, None]
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
    """Trains vectors of the pieces of a text.

    Args:
      sides: the text's sentences, in one language or both.
      seed: the same seed gives the same vectors.
      progress: called after every `READ_EVERY` steps and at the end of each epoch, with the epochs done and the loss
        per word since the last call.

    Raises:
      UserError: the text is empty, no word has a context, or the vectors are not finite.
    """
    counts = count_words(sides, tokenizer.vocab_size)
    if not counts.any():
        raise UserError("there are no words in the text to learn vectors of")
    rng = np.random.default_rng(seed)
    shape = (tokenizer.vocab_size, config.d_model)
    start = np.concatenate([rng.uniform(-0.5, 0.5, shape) / config.d_model, np.zeros(shape)])
    tables = Tables(jnp.asarray(start, jnp.float32), jnp.zeros(2 * tokenizer.vocab_size, jnp.float32))
    text = Text(sides, counts, config, seed)
    learned = 0
    for epoch in range(config.epochs):
        batches, loss = text.epoch(epoch), 0.0
        while some := list(itertools.islice(batches, READ_EVERY)):
            if some[0].done:
                progress(epoch + some[0].done, loss)
            losses = []
            for rows in some:
                left = 1 - (epoch + rows.done) / config.epochs
                tables, *measured = update(
                    tables,
                    touch(rows, tokenizer.vocab_size),
                    np.float32(config.learning_rate * left),
                    kind=config.kind,
                    negatives=config.negatives,
                )
                losses.append(measured)
            total, words = np.sum(jax.device_get(losses), axis=0)
            learned += words
            loss = total / max(words, 1)
        progress(epoch + 1, loss)
    if not learned:
        why = "every sentence is a single word"
        if config.subsample:
            why = f"config.vectors.subsample, {config.subsample:g}, leaves out too many words; raise it, or set it to 0"
        raise UserError(f"no word of this text had a context: {why}")
    table = np.array(tables.vectors[: tokenizer.vocab_size])
    if not np.isfinite(table).all():
        raise UserError(
            f"the vectors are not finite; lower config.vectors.learning_rate, which is {config.learning_rate}"
        )
    return Vectors.make(tokenizer, table, counts, count_whole_words(sides, tokenizer), rng)

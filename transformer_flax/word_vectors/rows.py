"""A text as rows of words for training, drawn anew in each epoch: all in NumPy, in bulk."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from transformer_flax.data.corpus import BLOCK, Sentences, count, ranges
from transformer_flax.special_tokens import NUM_SPECIAL, PAD_ID
from transformer_flax.word_vectors.config import VectorConfig

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

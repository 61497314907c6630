"""Batches of few static shapes, in which pairs of like length stand together (section 5.1).

A batch is {"source": int32 [B, L], "target": int32 [B, L]}, every sentence closed by the end symbol and padded with 0.
"""

import functools

import numpy as np

from transformer_flax.data.corpus import Corpus
from transformer_flax.errors import UserError

Batch = dict[str, np.ndarray]


def bucket_edges(lengths: np.ndarray, num_buckets: int) -> np.ndarray:
    """The at most `num_buckets` row lengths that hold sentences of these lengths with the least padding.

    Dynamic programming over the length histogram: best[k][j] is the fewest slots for all sentences of the j shortest
    lengths in k buckets. Returns ascending int64 edges, the last one the longest length.
    """
    values, counts = np.unique(lengths, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])  # sentences of the first j lengths
    best = np.where(np.arange(len(values) + 1) == 0, 0, np.inf)
    choices = []
    for _ in range(min(num_buckets, len(values))):
        # slots[j, i]: the lengths i .. j-1 share a bucket as wide as length j-1
        slots = best[None, :] + (below[:, None] - below[None, :]) * np.concatenate([[0], values])[:, None]
        slots[np.triu_indices(len(values) + 1)] = np.inf
        choices.append(np.argmin(slots, axis=1))
        best = np.min(slots, axis=1)
    edges, j = [], len(values)
    for choice in reversed(choices):
        edges.append(values[j - 1])
        j = choice[j]
    return np.array(edges[::-1], np.int64)


class Batches:
    """An endless random-access sequence: `batches[k]` is a pure function of (corpus, arguments, seed, k).

    Its shape does not depend on `seed`, which decides which pairs fill it. Every epoch shows every pair once, in
    `batches_per_epoch` batches; what does not fill a batch of its bucket moves up to the next wider one, and the last
    batch of the widest is filled up with empty rows.

    Args:
      corpus: the tokenised pairs.
      indices: the pairs to use.
      tokens_per_batch: at most so many slots a side.
      num_buckets: at most so many shapes.
      rows_multiple_of: the number of rows divides by it.
      data_seed: rules the order of shapes.
      seed: rules which pairs fill them.
      max_length: longer sides are cut to so many tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        indices: np.ndarray,
        *,
        tokens_per_batch: int,
        num_buckets: int,
        rows_multiple_of: int,
        data_seed: int,
        seed: int,
        max_length: int | None = None,
    ):
        if not len(indices):
            raise UserError("there are no sentence pairs to make batches of; see the counts above for what was dropped")
        self.corpus = corpus
        lengths = np.maximum(corpus.source.lengths, corpus.target.lengths)[indices]
        if max_length is not None:
            lengths = np.minimum(lengths, max_length)
        self.edges = bucket_edges(lengths, num_buckets)
        self.rows = tokens_per_batch // self.edges // rows_multiple_of * rows_multiple_of
        if not self.rows.all():
            raise UserError(
                f"config.data.tokens_per_batch is {tokens_per_batch}: too few for {rows_multiple_of} "
                f"(config.data.rows_multiple_of) rows of the longest pair, {self.edges[-1]} tokens; raise it to at "
                f"least {self.edges[-1] * rows_multiple_of}, or lower config.data.max_length"
            )
        bucket = np.searchsorted(self.edges, lengths)
        self._members = [indices[bucket == b] for b in range(len(self.edges))]
        counts, carried = [], 0
        for members, rows in zip(self._members, self.rows, strict=True):
            full, carried = divmod(len(members) + carried, int(rows))
            counts.append(full)
        counts[-1] += carried > 0
        self._buckets = np.repeat(np.arange(len(counts)), counts)
        self.batches_per_epoch = len(self._buckets)
        self._data_seed, self._seed = data_seed, seed
        self._epoch = functools.lru_cache(maxsize=2)(self._plan)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, length) of every batch shape."""
        return [(int(self.rows[b]), int(self.edges[b])) for b in np.unique(self._buckets)]

    def __getitem__(self, k: int) -> Batch:
        epoch, position = divmod(k, self.batches_per_epoch)
        bucket, pairs = self._epoch(epoch)[position]
        shape = (int(self.rows[bucket]), int(self.edges[bucket]))
        return {
            "source": self.corpus.source.padded(pairs, *shape),
            "target": self.corpus.target.padded(pairs, *shape),
        }

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(bucket, pairs) of every batch of an epoch, in order."""
        rng = np.random.default_rng((self._seed, epoch))
        carried = np.empty(0, np.int64)
        filled = []
        for members, rows in zip(self._members, self.rows, strict=True):
            pool = rng.permutation(np.concatenate([carried, members]))
            full = len(pool) // rows
            filled.append(iter(np.split(pool, np.arange(1, full + 1) * rows)))
            carried = pool[full * rows :]
        order = np.random.default_rng((self._data_seed, epoch)).permutation(self._buckets)
        return [(int(b), next(filled[b])) for b in order]

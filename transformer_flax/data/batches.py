"""Batches of few static shapes: pairs of like length together, a row each (section 5.1), or packed side by side.

A batch is {"source": int32 [B, L], "target": int32 [B, L]}, every sentence closed by the end symbol and padded with 0.
A packed one has "source_segments" and "target_segments" too, of the same shape: 1 where the first pair of a row stands,
2 for the second, and 0 for padding.
"""

import abc
import dataclasses
import functools
from typing import Any

import numpy as np

from transformer_flax.data.corpus import Corpus, blocks, count, ranges
from transformer_flax.data.packing import pack
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, PAD_ID

Batch = dict[str, np.ndarray]
SIDES = ("source", "target")


def bucket_edges(histogram: np.ndarray, num_buckets: int) -> np.ndarray:
    """The at most `num_buckets` row lengths that hold sentences of these lengths with the least padding.

    Dynamic programming over the histogram, in which `histogram[n]` sentences have n tokens: best[k][j] is the fewest
    slots for all sentences of the j shortest lengths in k buckets. Returns ascending int64 edges, the last one the
    longest length.
    """
    values = np.flatnonzero(histogram)
    counts = histogram[values]
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


class Batches(abc.ABC):
    """An endless random-access sequence: `batches[k]` is a pure function of (corpus, arguments, seed, k).

    Its shape does not depend on `seed`, which decides which pairs fill it. Every epoch shows every pair once, in
    `batches_per_epoch` batches, of which the last is filled up with empty rows.

    Args:
      corpus: the tokenised pairs.
      tokens_per_batch: at most so many slots a side.
      rows_multiple_of: the number of rows divides by it.
      data_seed: rules the order of shapes.
      seed: rules which pairs fill them.
      share: (i, n) for the i-th of n equal parts of each batch's rows, so that n hosts make one batch together; n must
        divide `rows_multiple_of`.
    """

    batches_per_epoch: int
    shapes: list[tuple[int, int]]  # (rows, length) of every shape of a whole batch

    def __init__(
        self,
        corpus: Corpus,
        *,
        tokens_per_batch: int,
        rows_multiple_of: int,
        data_seed: int,
        seed: int,
        share: tuple[int, int] = (0, 1),
    ):
        self.corpus = corpus
        self._tokens_per_batch, self._rows_multiple_of = tokens_per_batch, rows_multiple_of
        self._data_seed, self._seed, self._share = data_seed, seed, share
        self._epoch = functools.lru_cache(maxsize=2)(self._plan)

    @abc.abstractmethod
    def __getitem__(self, k: int) -> Batch:
        """This host's share of batch k."""

    @abc.abstractmethod
    def pairs(self, k: int) -> np.ndarray:
        """Which pairs of the corpus batch k holds, all shares together, row by row."""

    def lengths(self, k: int) -> dict[str, np.ndarray]:
        """Source and target tokens of each pair of batch k, all shares together: int64 [pairs]."""
        pairs = self.pairs(k)
        return {side: getattr(self.corpus, side).lengths_of(pairs) for side in SIDES}

    @abc.abstractmethod
    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's arrangement of the pairs, and its order of batches or rows."""

    def _num_rows(self, lengths: np.ndarray) -> np.ndarray:
        """How many rows of each length a batch has.

        Raises:
          UserError: none of the longest fits.
        """
        multiple = self._rows_multiple_of
        rows = self._tokens_per_batch // lengths // multiple * multiple
        if not rows.all():
            raise UserError(
                f"config.data.tokens_per_batch is {self._tokens_per_batch}: too few for {multiple} "
                f"(config.data.rows_multiple_of) rows of {lengths[-1]} tokens; raise it to at least "
                f"{lengths[-1] * multiple}, or lower config.data.max_length"
            )
        return rows

    def _shared(self, rows: int) -> slice:
        """Of so many rows, those that this host makes."""
        i, n = self._share
        return slice(rows * i // n, rows * (i + 1) // n)


class BucketedBatches(Batches):
    """One pair a row, beside others of like length; what does not fill a batch of its length moves up to the next.

    Args:
      indices: of the pairs to use.
      num_buckets: at most so many shapes.
      max_length: longer sides are cut to so many tokens, the last of a source being the end symbol nevertheless.
    """

    def __init__(
        self, corpus: Corpus, indices: np.ndarray, *, num_buckets: int, max_length: int | None = None, **arguments
    ):
        super().__init__(corpus, **arguments)
        indices = _require_pairs(indices)
        lengths = np.empty(len(indices), np.int32)
        for block in blocks(len(indices)):
            sides = corpus.source.lengths_of(indices[block]), corpus.target.lengths_of(indices[block])
            lengths[block] = np.minimum(np.maximum(*sides), max_length or np.inf)
        self.edges = bucket_edges(count(lengths, lengths.max() + 1), num_buckets)
        self.rows = self._num_rows(self.edges)
        buckets = zip([0, *self.edges[:-1]], self.edges, strict=True)
        self._members = [indices[(above < lengths) & (lengths <= edge)] for above, edge in buckets]
        counts, carried = [], 0
        for members, rows in zip(self._members, self.rows, strict=True):
            full, carried = divmod(len(members) + carried, int(rows))
            counts.append(full)
        counts[-1] += carried > 0
        self._buckets = np.repeat(np.arange(len(counts)), counts)  # of each batch, the narrow ones first
        self._starts = np.concatenate([[0], np.cumsum(self.rows[self._buckets])])  # of each, in an epoch's order
        self.batches_per_epoch = len(self._buckets)
        self.shapes = [(int(self.rows[b]), int(self.edges[b])) for b in np.unique(self._buckets)]

    def pairs(self, k: int) -> np.ndarray:
        return self._find(k)[0]

    def __getitem__(self, k: int) -> Batch:
        pairs, bucket = self._find(k)
        mine, width = self._shared(int(self.rows[bucket])), int(self.edges[bucket])
        pairs = pairs[mine]
        batch = {}
        for side in SIDES:
            sentences = getattr(self.corpus, side)
            whole = sentences.lengths_of(pairs)
            lengths = np.minimum(whole, width)
            slots = ranges(np.arange(len(pairs)) * width, lengths)
            batch[side] = _block((mine.stop - mine.start, width), slots, sentences.tokens(pairs, lengths))
            if side == "source":  # is read as it is where something is put out for it
                batch[side][: len(pairs)][whole > width, -1] = END_ID
        return batch

    def _find(self, k: int) -> tuple[np.ndarray, int]:
        """The pairs of a batch and its bucket."""
        epoch, position = divmod(k, self.batches_per_epoch)
        order, batches = self._epoch(epoch)
        batch = batches[position]
        return order[self._starts[batch] : self._starts[batch + 1]], self._buckets[batch]

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((self._seed, epoch))
        order, carried = [], np.empty(0, np.int32)
        for members, rows in zip(self._members, self.rows, strict=True):
            pool = rng.permutation(np.concatenate([carried, members]))
            full = len(pool) // rows * rows
            order.append(pool[:full])
            carried = pool[full:]
        batches = np.random.default_rng((self._data_seed, epoch)).permutation(self.batches_per_epoch)
        return np.concatenate([*order, carried]), batches


class PackedBatches(Batches):
    """As many pairs in a row as have room, all rows of one width; the rows are put together anew in each epoch.

    Args:
      indices: of the pairs to use.
      width: tokens in a row, at least those of the longest pair.
    """

    def __init__(self, corpus: Corpus, indices: np.ndarray, *, width: int, **arguments):
        super().__init__(corpus, **arguments)
        self._rows, self._width = int(self._num_rows(np.array([width]))[0]), width
        indices = _require_pairs(indices)
        lengths = np.empty((2, len(indices)), np.min_scalar_type(width))
        for block in blocks(len(indices)):
            lengths[:, block] = corpus.source.lengths_of(indices[block]), corpus.target.lengths_of(indices[block])
        packing = pack(lengths[0], lengths[1], width)
        self._packing = dataclasses.replace(packing, members=indices[packing.members])
        self.batches_per_epoch = -(-len(packing) // self._rows)
        self.shapes = [(self._rows, width)]

    def pairs(self, k: int) -> np.ndarray:
        return self._find(k, slice(None))[0]

    def __getitem__(self, k: int) -> Batch:
        mine = self._shared(self._rows)
        pairs, sizes = self._find(k, mine)
        row = np.repeat(np.arange(len(sizes)), sizes)
        segments = ranges(np.ones_like(sizes), sizes)
        shape = (mine.stop - mine.start, self._width)
        batch = {}
        for side in SIDES:
            sentences = getattr(self.corpus, side)
            lengths = sentences.lengths_of(pairs)
            before = np.cumsum(lengths) - lengths  # tokens of all rows before each pair
            slots = ranges(row * self._width + before - before[segments == 1][row], lengths)
            batch[side] = _block(shape, slots, sentences.tokens(pairs, lengths))
            batch[f"{side}_segments"] = _block(shape, slots, np.repeat(segments, lengths))
        return batch

    def _find(self, k: int, part: slice) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of a part of a batch's rows, and how many of them each row has."""
        epoch, position = divmod(k, self.batches_per_epoch)
        members, rows = self._epoch(epoch)
        return self._packing.look_up(members, rows[position * self._rows : (position + 1) * self._rows][part])

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((self._seed, epoch))
        return self._packing.shuffled(rng), rng.permutation(np.arange(len(self._packing), dtype=np.int32))


BATCHING = ("bucketed", "packed")


def training_batches(corpus: Corpus, indices: np.ndarray, config, *, seed: int, share: tuple[int, int]) -> Batches:
    """The batches of some pairs of a corpus that `config.data` asks for.

    Raises:
      UserError: there are no pairs, or the longest do not fit into a batch.
    """
    arguments: dict[str, Any] = {
        "tokens_per_batch": config.tokens_per_batch,
        "rows_multiple_of": config.rows_multiple_of,
        "data_seed": config.seed,
        "seed": seed,
        "share": share,
    }
    if config.batching == "packed":
        return PackedBatches(corpus, indices, width=config.max_length, **arguments)
    return BucketedBatches(corpus, indices, num_buckets=config.num_buckets, **arguments)


def _block(shape: tuple[int, int], slots: np.ndarray, values: np.ndarray) -> np.ndarray:
    block = np.full(shape, PAD_ID, np.int32)
    block.reshape(-1)[slots] = values
    return block


def _require_pairs(indices: np.ndarray) -> np.ndarray:
    if not len(indices):
        raise UserError("there are no sentence pairs to make batches of; see the counts above for what was dropped")
    return indices.astype(np.int32, copy=False)

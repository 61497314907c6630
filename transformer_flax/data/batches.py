"""Batches with a few static shapes: one pair a row, bucketed by length (section 5.1), or several pairs packed in a row.

A batch is {"source": int32 [B, L], "target": int32 [B, L]}. Every sentence ends with the end symbol, except a target
that was cut. Padding is 0. A packed batch also has "source_segments" and "target_segments" of the same shape: 1 for the
first pair of a row, 2 for the second pair, and 0 for padding.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from transformer_flax.data.bpe_dropout import BpeDropout
from transformer_flax.data.corpus import Corpus, blocks, count, ranges
from transformer_flax.data.packing import pack
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, PAD_ID

Batch = dict[str, np.ndarray]
SIDES = ("source", "target")


def bucket_edges(histogram: np.ndarray, num_buckets: int) -> np.ndarray:
    """Finds at most `num_buckets` row lengths that hold sentences of these lengths with the least padding.

    `histogram[n]` is the number of sentences of n tokens. Dynamic programming: best[k][j] is the fewest slots for all
    sentences of the j shortest lengths in k buckets. Returns ascending int64 edges; the last is the longest length.
    """
    values = np.flatnonzero(histogram)
    counts = histogram[values]
    below = np.concatenate([[0], np.cumsum(counts)])  # below[j]: the number of sentences of the j shortest lengths
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


def round_up(lengths: Any, multiple: int) -> Any:
    """Rounds each length up to a multiple of `multiple`."""
    return -(-lengths // multiple) * multiple


def rows_that_fit(lengths: Any, tokens_per_batch: int, multiple_of: int) -> Any:
    """Returns the number of rows of a batch, for each row length: as many as fit, rounded down to the multiple."""
    return tokens_per_batch // lengths // multiple_of * multiple_of


class Batches(abc.ABC):
    """An endless random-access sequence: `batches[k]` is a pure function of (corpus, arguments, seed, k).

    The shape of batch k does not depend on `seed`. Every epoch has every pair once, in `batches_per_epoch` batches. One
    batch of an epoch may have empty rows.

    Args:
      tokens_per_batch: the maximum number of slots on each side.
      rows_multiple_of: divides the number of rows.
      data_seed: determines the order of shapes.
      seed: determines which pairs fill each batch.
      text: returns the pairs of an epoch; no sentence may be longer than in `corpus`. None: `corpus` in every epoch.
      share: (i, n), with i from 0, makes part i of n equal parts of each batch's rows, so that n hosts make one
        batch together. n must divide `rows_multiple_of`.
    """

    batches_per_epoch: int
    shapes: list[tuple[int, int]]  # (rows, length) of every shape, over all shares
    _packed = False
    _max_length: int | None = None  # longer sentences are cut

    def __init__(
        self,
        corpus: Corpus,
        *,
        tokens_per_batch: int,
        rows_multiple_of: int,
        data_seed: int,
        seed: int,
        text: Callable[[int], Any] | None = None,
        share: tuple[int, int] = (0, 1),
    ):
        self._text = text or (lambda epoch: corpus)
        self._tokens_per_batch, self._rows_multiple_of = tokens_per_batch, rows_multiple_of
        self._data_seed, self._seed, self._share = data_seed, seed, share
        self._epoch = functools.lru_cache(maxsize=2)(self._plan)

    def __getitem__(self, k: int) -> Batch:
        """Returns this host's share of batch k."""
        (rows, width), pairs, sizes = self._find(k)
        longest = min(width, self._max_length or width)
        i, n = self._share
        mine = slice(rows * i // n, rows * (i + 1) // n)
        others, sizes = sizes[: mine.start].sum(), sizes[mine]  # `others`: the pairs of the shares before
        pairs = pairs[others : others + sizes.sum()]
        row = np.repeat(np.arange(len(sizes)), sizes)  # of each pair
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)  # the first pair of that row
        segments = np.arange(len(pairs)) - first + 1
        shape = (mine.stop - mine.start, width)
        batch = {}
        for side in SIDES:
            sentences = getattr(self.corpus_of(k), side)
            whole = sentences.lengths_of(pairs)
            lengths = np.minimum(whole, longest)
            before = np.cumsum(lengths) - lengths  # tokens before each pair, over all rows
            slots = ranges(row * width + before - before[first], lengths)
            batch[side] = _block(shape, slots, sentences.tokens(pairs, lengths))
            if self._packed:
                batch[f"{side}_segments"] = _block(shape, slots, np.repeat(segments, lengths))
            if side == "source":  # a cut source ends with the end symbol, as it does in translation
                batch[side][row[whole > longest], longest - 1] = END_ID
        return batch

    def pairs(self, k: int) -> np.ndarray:
        """Returns the indices of the pairs in batch k, over all shares, row by row."""
        _, pairs, _ = self._find(k)
        return pairs

    def first_of_each_shape(self) -> list[int]:
        """Returns the number k of the first batch of every shape."""
        first: dict[tuple[int, int], int] = {}
        for k in range(self.batches_per_epoch):
            shape, _, _ = self._find(k)
            first.setdefault(shape, k)
            if len(first) == len(self.shapes):
                break
        return [*first.values()]

    def lengths(self, k: int) -> dict[str, np.ndarray]:
        """Returns the source and target tokens of each pair of batch k, uncut, over all shares: int64 [pairs]."""
        pairs = self.pairs(k)
        return {side: getattr(self.corpus_of(k), side).lengths_of(pairs) for side in SIDES}

    def corpus_of(self, k: int) -> Any:
        """Returns the pairs with the spellings of batch k's epoch."""
        return self._text(k // self.batches_per_epoch)

    @abc.abstractmethod
    def _find(self, k: int) -> tuple[tuple[int, int], np.ndarray, np.ndarray]:
        """Returns the shape of batch k, its pairs row by row, and the number of pairs in each row that is not empty.

        All are over all shares.
        """

    @abc.abstractmethod
    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pairs of an epoch in order, and the order of the epoch's batches or rows."""

    def _num_rows(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the number of rows of a batch for each row length."""
        multiple = self._rows_multiple_of
        rows = rows_that_fit(lengths, self._tokens_per_batch, multiple)
        if not rows.all():
            raise UserError(
                f"config.data.tokens_per_batch is {self._tokens_per_batch}: too few for {multiple} "
                f"(config.data.rows_multiple_of) rows of {lengths[-1]} tokens; raise it to at least "
                f"{lengths[-1] * multiple}, or lower config.data.max_length"
            )
        return rows


class BucketedBatches(Batches):
    """Batches with one pair a row. The pairs of a batch have similar lengths.

    Pairs that are too few to fill a batch of their bucket move up to the next bucket.

    Args:
      num_buckets: the maximum number of shapes.
      max_length: cuts longer sentences; a cut source still ends with the end symbol.
      length_multiple_of: divides the width of every shape. Hardware multiplies matrices in tiles of 8 or more.
    """

    def __init__(
        self,
        corpus: Corpus,
        indices: np.ndarray,
        *,
        num_buckets: int,
        max_length: int | None = None,
        length_multiple_of: int = 1,
        **arguments,
    ):
        super().__init__(corpus, **arguments)
        self._max_length = max_length
        indices = _require_pairs(indices)
        lengths = np.empty(len(indices), np.int32)
        for block in blocks(len(indices)):
            sides = corpus.source.lengths_of(indices[block]), corpus.target.lengths_of(indices[block])
            lengths[block] = np.minimum(np.maximum(*sides), max_length or np.inf)
        widths = round_up(lengths, length_multiple_of)
        self.edges = bucket_edges(count(widths, widths.max() + 1), num_buckets)
        self.rows = self._num_rows(self.edges)
        buckets = zip([0, *self.edges[:-1]], self.edges, strict=True)
        self._members = [indices[(above < lengths) & (lengths <= edge)] for above, edge in buckets]
        counts, carried = [], 0
        for members, rows in zip(self._members, self.rows, strict=True):
            full, carried = divmod(len(members) + carried, int(rows))
            counts.append(full)
        counts[-1] += carried > 0
        # The bucket of each batch, narrow buckets first, and the position of its first pair in the order of an epoch.
        self._buckets = np.repeat(np.arange(len(counts)), counts)
        self._starts = np.concatenate([[0], np.cumsum(self.rows[self._buckets])])
        self.batches_per_epoch = len(self._buckets)
        self.shapes = [(int(self.rows[b]), int(self.edges[b])) for b in np.unique(self._buckets)]

    def _find(self, k: int) -> tuple[tuple[int, int], np.ndarray, np.ndarray]:
        epoch, position = divmod(k, self.batches_per_epoch)
        order, batches = self._epoch(epoch)
        batch = batches[position]
        bucket = self._buckets[batch]
        pairs = order[self._starts[batch] : self._starts[batch + 1]]
        return (int(self.rows[bucket]), int(self.edges[bucket])), pairs, np.ones_like(pairs)

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
    """Batches with as many pairs in a row as fit. In every epoch, pairs of the same lengths change places (`Packing`).

    All rows have `width` tokens a side, at least the length of the longest sentence.
    """

    _packed = True

    def __init__(self, corpus: Corpus, indices: np.ndarray, *, width: int, **arguments):
        super().__init__(corpus, **arguments)
        self._rows = int(self._num_rows(np.array([width]))[0])
        indices = _require_pairs(indices)
        lengths = np.empty((2, len(indices)), np.min_scalar_type(width))
        for block in blocks(len(indices)):
            lengths[:, block] = corpus.source.lengths_of(indices[block]), corpus.target.lengths_of(indices[block])
        packing = pack(lengths[0], lengths[1], width)
        self._packing = dataclasses.replace(packing, members=indices[packing.members])
        self.batches_per_epoch = -(-len(packing) // self._rows)
        self.shapes = [(self._rows, width)]

    def _find(self, k: int) -> tuple[tuple[int, int], np.ndarray, np.ndarray]:
        epoch, position = divmod(k, self.batches_per_epoch)
        members, rows = self._epoch(epoch)
        found = self._packing.look_up(members, rows[position * self._rows : (position + 1) * self._rows])
        return self.shapes[0], *found

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((self._seed, epoch))
        return self._packing.shuffled(rng), rng.permutation(np.arange(len(self._packing), dtype=np.int32))


def training_batches(
    corpus: Corpus, indices: np.ndarray, config, *, seed: int, share: tuple[int, int], dropout: BpeDropout | None = None
) -> Batches:
    """Returns the training batches of these pairs of a corpus, as `config.data` describes them.

    `seed` is `config.seed`; for `share`, see `Batches`. `dropout` spells the corpus anew in each epoch.
    """
    arguments: dict[str, Any] = {
        "tokens_per_batch": config.tokens_per_batch,
        "rows_multiple_of": config.rows_multiple_of,
        "data_seed": config.seed,
        "seed": seed,
        "share": share,
    }
    if dropout:
        corpus, arguments["text"] = dropout.room, functools.partial(dropout.epoch, seed)  # `room`: lengths alone
    if config.batching == "packed":
        return PackedBatches(corpus, indices, width=config.max_length, **arguments)
    own = {"num_buckets": config.num_buckets, "length_multiple_of": config.length_multiple_of}
    return BucketedBatches(corpus, indices, **own, **arguments)


def _block(shape: tuple[int, int], slots: np.ndarray, values: np.ndarray) -> np.ndarray:
    block = np.full(shape, PAD_ID, np.int32)
    block.reshape(-1)[slots] = values
    return block


def _require_pairs(indices: np.ndarray) -> np.ndarray:
    if not len(indices):
        raise UserError("there are no sentence pairs to make batches of; see the counts above for what was left out")
    return indices.astype(np.int32, copy=False)

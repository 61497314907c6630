"""Batches with a few static shapes: one pair a row, bucketed by length (section 5.1), or several pairs packed in a row.

A batch is {"source": int32 [B, L], "target": int32 [B, L]}. Every sentence ends with the end symbol, except a target
that was cut. Padding is 0. A packed batch also has "source_segments" and "target_segments" of the same shape: 1 for the
first pair of a row, 2 for the second pair, and 0 for padding.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

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


class Plan(NamedTuple):
    """The batches of an epoch in order, over all shares."""

    batches: list[tuple[tuple[int, int], np.ndarray]]  # the shape (rows, length) of each, and what `look_up` takes
    # Returns the indices of a batch's pairs, row by row, and the number of pairs in each row that is not empty.
    look_up: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(eq=False, repr=False)
class Batches(abc.ABC):
    """An endless random-access sequence: `batches[k]` is a pure function of (its fields, k).

    The shape of batch k does not depend on `seed`. Every epoch has every pair once, in `batches_per_epoch` batches. One
    batch of an epoch may have empty rows.
    """

    corpus: Corpus
    indices: dataclasses.InitVar[np.ndarray]  # the pairs of the corpus to show
    _: dataclasses.KW_ONLY
    tokens_per_batch: int  # the maximum number of slots on each side
    rows_multiple_of: int  # divides the number of rows
    data_seed: int  # determines the order of shapes
    seed: int  # determines which pairs fill each batch
    max_length: int | None = None  # cuts longer sentences; a cut source still ends with the end symbol
    # Returns the pairs of an epoch; no sentence may be longer than in `corpus`. None: `corpus` in every epoch.
    text: Callable[[int], Any] | None = None
    # (i, n), with i from 0, makes part i of n equal parts of each batch's rows, so that n hosts make one batch
    # together. n must divide `rows_multiple_of`.
    share: tuple[int, int] = (0, 1)

    _packed: ClassVar[bool] = False

    def __post_init__(self, indices: np.ndarray):
        if not len(indices):
            raise UserError(
                "there are no sentence pairs to make batches of; see the counts above for what was left out"
            )
        self._epoch = functools.lru_cache(maxsize=2)(self._plan)
        self._group(indices.astype(np.int32, copy=False))

    def __getitem__(self, k: int) -> Batch:
        """Returns this host's share of batch k."""
        (rows, width), pairs, sizes = self._find(k)
        i, n = self.share
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
            lengths = np.clip(whole, None, self.max_length)
            ends = np.cumsum(lengths)
            before = ends - lengths  # tokens before each pair, over all rows
            slots = ranges(row * width + before - before[first], lengths)
            tokens = sentences.tokens(pairs, lengths)
            if side == "source":  # a cut source ends with the end symbol, as it does in translation
                tokens[ends[whole > lengths] - 1] = END_ID
            batch[side] = _block(shape, slots, tokens)
            if self._packed:
                batch[f"{side}_segments"] = _block(shape, slots, np.repeat(segments, lengths))
        return batch

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        return len(self._epoch(0).batches)

    @functools.cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """The (rows, length) of every shape, over all shares, the shortest first."""
        return sorted({shape for shape, _ in self._epoch(0).batches}, key=lambda shape: shape[1])

    def first_of_each_shape(self) -> list[int]:
        """Returns the number k of the first batch of every shape."""
        first: dict[tuple[int, int], int] = {}
        for k, (shape, _) in enumerate(self._epoch(0).batches):
            first.setdefault(shape, k)
        return [*first.values()]

    def pairs(self, k: int) -> np.ndarray:
        """Returns the indices of the pairs in batch k, over all shares, row by row."""
        _, pairs, _ = self._find(k)
        return pairs

    def lengths(self, k: int) -> dict[str, np.ndarray]:
        """Returns the source and target tokens of each pair of batch k, uncut, over all shares: int64 [pairs]."""
        pairs = self.pairs(k)
        return {side: getattr(self.corpus_of(k), side).lengths_of(pairs) for side in SIDES}

    def corpus_of(self, k: int) -> Any:
        """Returns the pairs with the spellings of batch k's epoch."""
        return self.text(k // self.batches_per_epoch) if self.text else self.corpus

    def _find(self, k: int) -> tuple[tuple[int, int], np.ndarray, np.ndarray]:
        """Returns the shape of batch k, and what the plan's `look_up` returns."""
        epoch, position = divmod(k, self.batches_per_epoch)
        plan = self._epoch(epoch)
        shape, part = plan.batches[position]
        return shape, *plan.look_up(part)

    @abc.abstractmethod
    def _group(self, indices: np.ndarray) -> None:
        """Groups the pairs by their lengths, in the same way for all epochs."""

    @abc.abstractmethod
    def _plan(self, epoch: int) -> Plan:
        """Plans an epoch."""

    def _lengths(self, side: str, indices: np.ndarray, dtype: Any = np.int32) -> np.ndarray:
        """Returns the tokens of one side of these pairs, cut: [len(indices)]."""
        lengths = np.empty(len(indices), dtype)
        for block in blocks(len(indices)):
            whole = getattr(self.corpus, side).lengths_of(indices[block])
            lengths[block] = np.clip(whole, None, self.max_length)
        return lengths

    def _num_rows(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the number of rows of a batch for each row length."""
        multiple = self.rows_multiple_of
        rows = rows_that_fit(lengths, self.tokens_per_batch, multiple)
        if not rows.all():
            raise UserError(
                f"config.data.tokens_per_batch is {self.tokens_per_batch}: too few for {multiple} "
                f"(config.data.rows_multiple_of) rows of {lengths[-1]} tokens; raise it to at least "
                f"{lengths[-1] * multiple}, or lower config.data.max_length"
            )
        return rows


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class BucketedBatches(Batches):
    """Batches with one pair a row. The pairs of a batch have similar lengths.

    Pairs that are too few to fill a batch of their bucket move up to the next bucket.
    """

    num_buckets: int  # the maximum number of shapes
    length_multiple_of: int = 1  # divides the width of every shape; hardware multiplies matrices in tiles of 8 or more

    def _group(self, indices: np.ndarray) -> None:
        lengths = np.maximum(self._lengths("source", indices), self._lengths("target", indices))
        widths = round_up(lengths, self.length_multiple_of)
        self.edges = bucket_edges(count(widths, widths.max() + 1), self.num_buckets)
        self.rows = self._num_rows(self.edges)
        buckets = zip([0, *self.edges[:-1]], self.edges, strict=True)
        self._members = [indices[(above < lengths) & (lengths <= edge)] for above, edge in buckets]

    def _plan(self, epoch: int) -> Plan:
        rng = np.random.default_rng((self.seed, epoch))
        batches, carried = [], np.empty(0, np.int32)
        shapes = [*zip(self.rows.tolist(), self.edges.tolist(), strict=True)]
        for members, shape in zip(self._members, shapes, strict=True):
            pool = rng.permutation(np.concatenate([carried, members]))
            rows, _ = shape
            full = len(pool) // rows * rows
            batches += [(shape, pairs) for pairs in pool[:full].reshape(-1, rows)]
            carried = pool[full:]
        if len(carried):  # fewer than fill a batch of the last bucket
            batches.append((shapes[-1], carried))
        order = np.random.default_rng((self.data_seed, epoch)).permutation(len(batches))
        return Plan([batches[i] for i in order], _one_a_row)


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class PackedBatches(Batches):
    """Batches with as many pairs in a row as fit. Pairs of the same lengths change places in each epoch (`Packing`)."""

    width: int  # tokens a side of every row, at least the length of the longest sentence

    _packed = True

    def _group(self, indices: np.ndarray) -> None:
        self._shape = int(self._num_rows(np.array([self.width]))[0]), self.width
        dtype = np.min_scalar_type(self.width)  # packing takes several times the memory of its lengths
        source, target = (self._lengths(side, indices, dtype) for side in SIDES)
        packing = pack(source, target, self.width)
        self._packing = dataclasses.replace(packing, members=indices[packing.members])

    def _plan(self, epoch: int) -> Plan:
        rng = np.random.default_rng((self.seed, epoch))
        members = self._packing.shuffled(rng)
        order = rng.permutation(np.arange(len(self._packing), dtype=np.int32))
        rows, _ = self._shape
        batches = [(self._shape, order[start : start + rows]) for start in range(0, len(order), rows)]
        return Plan(batches, functools.partial(self._packing.look_up, members))


def training_batches(
    corpus: Corpus, indices: np.ndarray, config, *, seed: int, share: tuple[int, int], dropout: BpeDropout | None = None
) -> Batches:
    """Returns the training batches of these pairs of a corpus, as `config.data` describes them.

    `seed` is `config.seed`; for `share`, see `Batches`. `dropout` spells the corpus anew in each epoch.
    """
    if config.batching == "packed":
        make = functools.partial(PackedBatches, width=config.max_length)
    else:
        own = {"num_buckets": config.num_buckets, "length_multiple_of": config.length_multiple_of}
        make = functools.partial(BucketedBatches, **own)
    return make(
        dropout.room if dropout else corpus,  # `room` has the lengths alone
        indices,
        tokens_per_batch=config.tokens_per_batch,
        rows_multiple_of=config.rows_multiple_of,
        data_seed=config.seed,
        seed=seed,
        text=functools.partial(dropout.epoch, seed) if dropout else None,
        share=share,
    )


def _one_a_row(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return pairs, np.ones_like(pairs)


def _block(shape: tuple[int, int], slots: np.ndarray, values: np.ndarray) -> np.ndarray:
    block = np.full(shape, PAD_ID, np.int32)
    block.reshape(-1)[slots] = values
    return block

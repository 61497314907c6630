"""Sentence pairs with random access."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from transformer_flax.errors import UserError

SPLITS = ("train", "valid", "test")
CHUNK = 2048  # pairs read at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Sentence pairs, numbered from 0."""

    fingerprint: str  # changes whenever a pair changes; for TFDS, see `tfds_pairs`
    count: int
    read: Callable[[Sequence[int]], list[tuple[str, str]]]  # the pairs at these indices; many at once are read faster
    raw: "Pairs | None" = None  # the same pairs before normalisation; None if nothing was normalised

    def __len__(self) -> int:
        return self.count


def iterate_pairs(pairs: Pairs, indices: range | np.ndarray | None = None) -> Iterator[list[tuple[str, str]]]:
    """Yields the pairs at `indices`, or all pairs, in lists of at most CHUNK."""
    if indices is None:
        indices = range(len(pairs))
    for start in range(0, len(indices), CHUNK):
        yield pairs.read(np.asarray(indices[start : start + CHUNK]).tolist())


def require_split(split: str) -> None:
    """Checks that a split is one of SPLITS."""
    if split not in SPLITS:
        raise UserError(f"there is no split {split!r}; the splits are {', '.join(SPLITS)}")

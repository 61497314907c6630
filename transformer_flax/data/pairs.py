"""Sentence pairs with random access."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Sentence pairs, numbered from 0."""

    fingerprint: str  # changes whenever a pair changes
    count: int
    read: Callable[[Sequence[int]], list[tuple[str, str]]]  # the pairs at these indices; many at once are read faster
    raw: "Pairs | None" = None  # the same pairs before normalisation; None if nothing was normalised

    def __len__(self) -> int:
        return self.count


def iterate_pairs(pairs: Pairs, indices: range | np.ndarray, size: int) -> Iterator[list[tuple[str, str]]]:
    """Yields the pairs at `indices` in lists of at most `size`."""
    for start in range(0, len(indices), size):
        yield pairs.read(np.asarray(indices[start : start + size]).tolist())

"""Pairs side by side in rows of one width, so that few of their slots stay empty."""

import collections
import dataclasses
import itertools

import numpy as np

from transformer_flax.data.corpus import blocks, count, ranges


@dataclasses.dataclass(frozen=True)
class Packing:
    """Rows of pairs: row r holds the pairs members[places[offsets[r]:offsets[r+1]]].

    Pairs of the same two lengths are a class; whichever of them stand where, the rows are of the same lengths. So
    `members`, which are the pairs class by class, may be shuffled within each.
    """

    members: np.ndarray  # int32 [pairs]
    class_offsets: np.ndarray  # int64 [classes + 1]
    places: np.ndarray  # int32 [pairs]
    offsets: np.ndarray  # int64 [rows + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def shuffled(self, rng: np.random.Generator) -> np.ndarray:
        """Other `members` for the same rows: int32 [pairs]."""
        members = self.members.copy()
        for start, stop in itertools.pairwise(self.class_offsets.tolist()):
            rng.shuffle(members[start:stop])
        return members

    def look_up(self, members: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of some rows, one row after the other, and how many each has."""
        starts = self.offsets[rows]
        sizes = self.offsets[rows + 1] - starts
        return members[self.places[ranges(starts, sizes)]], sizes


def pack(source_lengths: np.ndarray, target_lengths: np.ndarray, width: int) -> Packing:
    """Lays pairs into rows that hold `width` tokens a side: the longest first, each where it leaves the least room.

    Rows that are filled alike are filled together, so what it takes depends on the number of classes, not of pairs.

    Args:
      source_lengths, target_lengths: int [pairs], from 1 to `width`.
      width: of a row.
    """
    key = source_lengths.astype(np.int32) * (width + 1) + target_lengths  # of a pair's class
    histogram = count(key, (width + 1) ** 2)
    classes = np.flatnonzero(histogram)
    members = _sort(key, histogram)
    del key  # millions of pairs are held in memory: none of their numbers for longer than needed

    counts = histogram[classes]
    class_offsets = np.concatenate([[0], np.cumsum(counts)])
    used = class_offsets[:-1].copy()  # of each class, the first of its members that has no place yet
    places = np.empty(len(members), np.int32)
    filled, sizes = 0, []
    for content, rows in _fill(np.stack(np.divmod(classes, width + 1), axis=1), counts, width):
        block = places[filled : filled + rows * len(content)].reshape(rows, len(content))
        for column, c in enumerate(content):
            block[:, column] = np.arange(used[c], used[c] + rows)
            used[c] += rows
        filled += block.size
        sizes.append(np.full(rows, len(content)))
    return Packing(members, class_offsets, places, np.concatenate([[0], np.cumsum(np.concatenate(sizes))]))


def _sort(key: np.ndarray, histogram: np.ndarray) -> np.ndarray:
    """`np.argsort(key, kind="stable")` as int32, in little memory: by counting."""
    order = np.empty(len(key), np.int32)
    start = np.cumsum(histogram) - histogram  # of what is still to come of each key
    for block in blocks(len(key)):
        within = np.argsort(key[block], kind="stable")
        keys = key[block][within]
        first = np.searchsorted(keys, keys)
        order[start[keys] + np.arange(len(keys)) - first] = block.start + within
        start += np.bincount(keys, minlength=len(start))
    return order


def _fill(sides: np.ndarray, counts: np.ndarray, width: int) -> list[tuple[list[int], int]]:
    """Packs pairs of classes with these (source, target) lengths: (the classes in a row, number of such rows)."""
    piles: list[tuple[list[int], int]] = []
    with_room = collections.defaultdict(list)  # of piles, by the room (source, target) that their rows have left
    is_there = np.zeros((width + 1, width + 1), bool)  # the same as a table

    def add(content: list[int], rows: int, room: tuple[int, int]) -> None:
        with_room[room].append(len(piles))
        is_there[room] = True
        piles.append((content, rows))

    for c in np.lexsort((sides.sum(axis=1), sides.max(axis=1)))[::-1].tolist():
        (source, target), left = sides[c].tolist(), int(counts[c])
        while left:
            source_room, target_room = np.nonzero(is_there[source:, target:])  # what would be left, where it fits
            if len(source_room):
                tightest = np.argmin(source_room + target_room)
                room = int(source_room[tightest]) + source, int(target_room[tightest]) + target
                pile = with_room[room].pop()
                content, rows = piles[pile]
                taken = min(rows, left)
                if taken < rows:
                    with_room[room].append(pile)
                piles[pile] = (content, rows - taken)
                is_there[room] = bool(with_room[room])
            else:  # new rows: as many as would hold what is left of this class alone
                content, room = [], (width, width)
                taken = max(1, left // (width // max(source, target)))
            add([*content, c], taken, (room[0] - source, room[1] - target))
            left -= taken
    return [(content, rows) for content, rows in piles if rows]

"""Packing: puts several pairs side by side in rows of one width, so that few slots stay empty."""

import dataclasses
import itertools

import numpy as np

from transformer_flax.data.corpus import ranges


@dataclasses.dataclass(frozen=True)
class Packing:
    """Rows of pairs: row r holds the pairs members[places[offsets[r]:offsets[r+1]]].

    Pairs with the same source length and the same target length form a class. Exchanging two pairs of a class does not
    change the length of any row. So `members`, which lists the pairs class by class, may be shuffled within each class.
    """

    members: np.ndarray  # int32 [pairs]
    class_offsets: np.ndarray  # int64 [classes + 1]
    places: np.ndarray  # int32 [pairs]
    offsets: np.ndarray  # int64 [rows + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def shuffled(self, rng: np.random.Generator) -> np.ndarray:
        """Returns `members`, shuffled within each class: int32 [pairs]."""
        members = self.members.copy()
        for start, stop in itertools.pairwise(self.class_offsets.tolist()):
            rng.shuffle(members[start:stop])
        return members

    def look_up(self, members: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pairs of the given rows, concatenated, and the number of pairs in each row."""
        starts = self.offsets[rows]
        sizes = self.offsets[rows + 1] - starts
        return members[self.places[ranges(starts, sizes)]], sizes


def pack(source_lengths: np.ndarray, target_lengths: np.ndarray, width: int) -> Packing:
    """Packs pairs into rows of `width` tokens a side: longest pairs first, each where it leaves the least room.

    The lengths are int [pairs], from 1 to `width`. Rows with the same content are filled together, so the time depends
    on the number of classes, not on the number of pairs.
    """
    members = np.lexsort((target_lengths, source_lengths)).astype(np.int32)  # by source length, then by target length
    begins = np.ones(len(members), bool)  # True where a class begins
    begins[1:] = np.diff(source_lengths[members]) != 0
    begins[1:] |= np.diff(target_lengths[members]) != 0
    class_offsets = np.append(np.flatnonzero(begins), len(members))
    first = members[begins]
    counts = np.diff(class_offsets)
    classes = np.stack([source_lengths[first], target_lengths[first]], axis=1)
    used = class_offsets[:-1].copy()  # for each class, the index of its first member without a place
    places = np.empty(len(members), np.int32)
    filled, sizes = 0, []
    for content, rows in _fill(classes, counts, width):
        block = places[filled : filled + rows * len(content)].reshape(rows, len(content))
        for column, c in enumerate(content):
            block[:, column] = np.arange(used[c], used[c] + rows)
            used[c] += rows
        filled += block.size
        sizes.append(np.full(rows, len(content)))
    return Packing(members, class_offsets, places, np.concatenate([[0], np.cumsum(np.concatenate(sizes))]))


def _fill(sides: np.ndarray, counts: np.ndarray, width: int) -> list[tuple[list[int], int]]:
    """Packs the pairs class by class, the longest first.

    A pile is a number of rows with the same content, that is, with pairs of the same classes. A class is added to whole
    piles at once, so the time does not depend on the number of pairs.

    Args:
      sides: [C, 2], the source and target length of each class.
      counts: [C], the number of pairs of each class.
      width: tokens a side of a row.

    Returns:
      For each pile, the classes in a row and the number of such rows.
    """
    piles: list[tuple[list[int], int]] = []
    with_room: list[list[int]] = []  # with_room[place]: the piles whose rows have the room of that place
    places: dict[tuple[int, int], int] = {}  # index of each room in `with_room`
    rooms = np.empty((2, 1), np.int64)  # (source, target) room of each place, or -1 while the place has no pile

    def add(content: list[int], rows: int, room: tuple[int, int]) -> None:
        nonlocal rooms
        place = places.setdefault(room, len(places))
        if place == len(with_room):
            with_room.append([])
        if place == rooms.shape[1]:
            rooms = np.concatenate([rooms, np.empty_like(rooms)], axis=1)
        rooms[:, place] = room
        with_room[place].append(len(piles))
        piles.append((content, rows))

    for c in np.lexsort((sides.sum(axis=1), sides.max(axis=1)))[::-1].tolist():
        (source, target), left = sides[c].tolist(), int(counts[c])
        while left:
            there = rooms[:, : len(places)]
            fitting = np.flatnonzero((there[0] >= source) & (there[1] >= target))
            if len(fitting):  # prefer the least room in total, then the least room on the source side
                place = fitting[np.argmin(there[:, fitting].sum(axis=0) * (width + 1) + there[0, fitting])]
                room = int(there[0, place]), int(there[1, place])
                pile = with_room[place].pop()
                content, rows = piles[pile]
                taken = min(rows, left)
                if taken < rows:
                    with_room[place].append(pile)
                piles[pile] = (content, rows - taken)
                if not with_room[place]:
                    rooms[:, place] = -1
            else:  # open as many new rows as the rest of this class alone would fill
                content, room = [], (width, width)
                taken = max(1, left // (width // max(source, target)))
            add([*content, c], taken, (room[0] - source, room[1] - target))
            left -= taken
    return [(content, rows) for content, rows in piles if rows]

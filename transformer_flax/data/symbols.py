"""Lines of random letters to copy or to reverse: nothing to know, so what a model makes of the length alone shows."""

import hashlib
import string

import numpy as np

from transformer_flax.errors import UserError

SYMBOLS = np.array(list(string.ascii_lowercase))
HELD_OUT = 1_000  # lines in each of valid and test
SHORTEST_HELD_OUT = 4  # symbols; there are too few shorter lines to keep some of them from train
LONGEST = 10_000  # symbols; what is longer is a mistake


def draw_lines(split: str, *, num_pairs: int, longest_trained: int, longest_tested: int, seed: int) -> list[str]:
    """The sources of a split, such as "q e h": every number of symbols is equally likely, and no line is in two splits.

    train has `num_pairs` lines of at most `longest_trained` symbols, among which a line may come twice. valid has
    HELD_OUT lines, all different, of these lengths but the shortest. test has as many that are longer, of at most
    `longest_tested` symbols; where that is `longest_trained`, they are as those of valid. Longer lines of test change
    nothing in train and valid.
    """
    of_valid, of_test, of_train = (np.random.default_rng((seed, part)) for part in range(3))
    valid = _draw_distinct(of_valid, {}, SHORTEST_HELD_OUT, longest_trained)
    shortest = longest_trained + 1 if longest_tested > longest_trained else SHORTEST_HELD_OUT
    test = _draw_distinct(of_test, valid, shortest, longest_tested)
    if split != "train":
        return list(valid if split == "valid" else test)
    train: list[str] = []
    while len(train) < num_pairs:
        drawn = _draw(of_train, num_pairs, 1, longest_trained)
        train += [line for line in drawn if line not in valid and line not in test]
    return train[:num_pairs]


def _draw(rng: np.random.Generator, size: int, shortest: int, longest: int) -> list[str]:
    lengths = rng.integers(shortest, longest, size, endpoint=True)
    letters = SYMBOLS[rng.integers(len(SYMBOLS), size=lengths.sum())]
    return [" ".join(line) for line in np.split(letters, np.cumsum(lengths)[:-1])]


def _draw_distinct(rng: np.random.Generator, others: dict[str, None], shortest: int, longest: int) -> dict[str, None]:
    """HELD_OUT lines that are not among `others`, in the order of drawing, which a set would lose."""
    lines: dict[str, None] = {}
    while len(lines) < HELD_OUT:
        lines |= dict.fromkeys(line for line in _draw(rng, HELD_OUT, shortest, longest) if line not in others)
    return dict.fromkeys(list(lines)[:HELD_OUT])


class SymbolPairs:
    """The lines of a split with themselves ("copy"), or read backwards ("reverse")."""

    def __init__(self, config, split: str):
        if config.num_pairs < 1:
            raise UserError(
                f"config.data.num_pairs is {config.num_pairs}; source {config.source!r} needs to know how many "
                "training pairs to make, at least 1"
            )
        if not SHORTEST_HELD_OUT <= config.longest_trained <= config.longest_tested <= LONGEST:
            raise UserError(
                f"config.data.longest_trained is {config.longest_trained} and longest_tested {config.longest_tested}; "
                f"source {config.source!r} needs {SHORTEST_HELD_OUT} <= longest_trained <= longest_tested <= "
                f"{LONGEST:,} symbols"
            )
        self._backwards = config.source == "reverse"
        self.lines = draw_lines(
            split,
            num_pairs=config.num_pairs,
            longest_trained=config.longest_trained,
            longest_tested=config.longest_tested,
            seed=config.seed,
        )
        self.fingerprint = hashlib.sha256("\n".join([config.source, split, *self.lines]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[str, str]:
        line = self.lines[index]
        return line, line[::-1] if self._backwards else line

"""English to German number words: a real pair of languages that needs no download.

twenty-one is einundzwanzig: the languages cross, so copying word by word does not do.
"""

import hashlib
import importlib.metadata

import numpy as np
from num2words import num2words

from transformer_flax.errors import UserError

ALWAYS_TRAINED = 1_000  # numbers below it are all in train
HELD_OUT = 1_000  # numbers in each of valid and test
SHORTEST_HELD_OUT = 4  # digits
LONGEST = 18  # digits; 19 are more than 64 bits hold


def split_numbers(
    split: str, num_pairs: int, seed: int, *, longest_trained: int = 6, longest_tested: int = 6
) -> np.ndarray:
    """The numbers of a split: every number of digits is equally likely, and no number is in two splits.

    valid and test are HELD_OUT distinct numbers each, from SHORTEST_HELD_OUT digits up; train is all numbers below
    ALWAYS_TRAINED, then draws until there are `num_pairs`. None has more digits than `longest_trained`, except that
    those of test all have, where `longest_tested` says so.
    """
    rng = np.random.default_rng(seed)
    held_out = _draw_distinct(rng, 2 * HELD_OUT, SHORTEST_HELD_OUT, longest_trained)
    if split == "valid":
        return held_out[:HELD_OUT]
    if split == "test" and longest_tested > longest_trained:
        return _draw_distinct(rng, HELD_OUT, longest_trained + 1, longest_tested)
    if split == "test":
        return held_out[HELD_OUT:]
    draws = _draw(rng, 2 * num_pairs, 1, longest_trained)
    draws = draws[~np.isin(draws, held_out)]
    return np.concatenate([np.arange(ALWAYS_TRAINED), draws])[:num_pairs]


def _draw_distinct(rng: np.random.Generator, size: int, min_digits: int, max_digits: int) -> np.ndarray:
    drawn: dict[int, None] = {}  # a dict, to keep the order of drawing
    while len(drawn) < size:
        drawn.update(dict.fromkeys(_draw(rng, HELD_OUT, min_digits, max_digits).tolist()))
    return np.array(list(drawn))[:size]


def _draw(rng: np.random.Generator, size: int, min_digits: int, max_digits: int) -> np.ndarray:
    digits = rng.integers(min_digits, max_digits, size, endpoint=True)
    return rng.integers(np.where(digits == 1, 0, 10 ** (digits - 1)), 10**digits)


class NumberPairs:
    """The number words of a split, spelt when they are asked for."""

    def __init__(self, config, split: str):
        if not ALWAYS_TRAINED <= config.num_pairs <= 100_000:
            raise UserError(
                f"config.data.num_pairs is {config.num_pairs}; source 'numbers' has from {ALWAYS_TRAINED:,} "
                "to 100,000 training pairs"
            )
        if not SHORTEST_HELD_OUT <= config.longest_trained <= config.longest_tested <= LONGEST:
            raise UserError(
                f"config.data.longest_trained is {config.longest_trained} and longest_tested {config.longest_tested}; "
                f"source 'numbers' needs {SHORTEST_HELD_OUT} <= longest_trained <= longest_tested <= {LONGEST} digits"
            )
        self.languages = (config.source_language, config.target_language)
        for language in self.languages:
            _spell(0, language)
        self.numbers = split_numbers(
            split,
            config.num_pairs,
            config.seed,
            longest_trained=config.longest_trained,
            longest_tested=config.longest_tested,
        )
        version = importlib.metadata.version("num2words")
        described = f"numbers {split} {self.languages} {version}".encode() + self.numbers.astype("<i8").tobytes()
        self.fingerprint = hashlib.sha256(described).hexdigest()

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[str, str]:
        source_language, target_language = self.languages
        number = int(self.numbers[index])
        return _spell(number, source_language), _spell(number, target_language)


def _spell(number: int, language: str) -> str:
    try:
        return num2words(number, lang=language)
    except NotImplementedError as error:  # num2words' word for a language it lacks
        raise UserError(f"num2words cannot count in {language!r}; it can in 'en', 'de', 'fr' and others") from error

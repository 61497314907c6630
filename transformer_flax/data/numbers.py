"""English to German number words: a real pair of languages that needs no download.

twenty-one is einundzwanzig: the languages cross, so copying word by word does not do.
"""

import hashlib
import importlib.metadata

import numpy as np
from num2words import num2words

from transformer_flax.errors import UserError

LIMIT = 10**6  # numbers are below it
ALWAYS_TRAINED = 1_000  # numbers below it are all in train
HELD_OUT = 1_000  # numbers in each of valid and test


def split_numbers(split: str, num_pairs: int, seed: int) -> np.ndarray:
    """The numbers of a split: every number of digits is equally likely, and no number is in two splits.

    valid and test are HELD_OUT distinct numbers each, from 4 digits up; train is all numbers below ALWAYS_TRAINED, then
    draws until there are `num_pairs`.
    """
    rng = np.random.default_rng(seed)
    held_out: dict[int, None] = {}  # a dict, to keep the order of drawing
    while len(held_out) < 2 * HELD_OUT:
        held_out.update(dict.fromkeys(_draw(rng, HELD_OUT, min_digits=4).tolist()))
    valid_and_test = np.array(list(held_out))
    if split != "train":
        return valid_and_test[:HELD_OUT] if split == "valid" else valid_and_test[HELD_OUT : 2 * HELD_OUT]
    draws = _draw(rng, 2 * num_pairs, min_digits=1)
    draws = draws[~np.isin(draws, valid_and_test[: 2 * HELD_OUT])]
    return np.concatenate([np.arange(ALWAYS_TRAINED), draws])[:num_pairs]


def _draw(rng: np.random.Generator, size: int, min_digits: int) -> np.ndarray:
    digits = rng.integers(min_digits, 6, size, endpoint=True)
    return rng.integers(np.where(digits == 1, 0, 10 ** (digits - 1)), 10**digits)


class NumberPairs:
    """The number words of a split, spelt when they are asked for."""

    def __init__(self, config, split: str):
        if not ALWAYS_TRAINED <= config.num_pairs <= 100_000:
            raise UserError(
                f"config.data.num_pairs is {config.num_pairs}; source 'numbers' has from {ALWAYS_TRAINED:,} "
                "to 100,000 training pairs"
            )
        self.languages = (config.source_language, config.target_language)
        for language in self.languages:
            _spell(0, language)
        self.numbers = split_numbers(split, config.num_pairs, config.seed)
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

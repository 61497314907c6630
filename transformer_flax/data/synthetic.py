"""Generated pairs: number words in two languages, and lines of letters to copy or to reverse.

Number words are a real pair of languages that needs no download. twenty-one is einundzwanzig: the order changes, so
copying word by word fails. Lines of letters need no knowledge, so they show the effect of length alone.
"""

import hashlib
import importlib.metadata
import string
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeVar

import numpy as np
from num2words import num2words

from transformer_flax.data.sentence_pairs import Pairs
from transformer_flax.errors import UserError

HELD_OUT = 1_000  # numbers or lines in valid, and as many in test; all are different
SHORTEST_HELD_OUT = 4  # digits or symbols: shorter items are few, and train needs them
ALWAYS_TRAINED = 1_000  # the first numbers of train are those below ALWAYS_TRAINED
MOST_DIGITS = 18  # 64 bits do not hold all numbers of 19 digits
MOST_SYMBOLS = 10_000
SYMBOLS = np.array(list(string.ascii_lowercase))

Item = TypeVar("Item")


def split_numbers(split: str, config) -> np.ndarray:
    """Draws the numbers of a split. All digit counts are equally likely, and no number is in two splits.

    Drawn numbers of another split are left out of train, which makes those of SHORTEST_HELD_OUT digits rarer there.

    train has the numbers below ALWAYS_TRAINED, then drawn numbers, `config.num_pairs` in all. valid and test have
    HELD_OUT numbers each, with SHORTEST_HELD_OUT to `config.longest_trained` digits. If `config.longest_tested` is
    larger than `longest_trained`, all numbers of test have more than `longest_trained` digits, and at most
    `longest_tested`.
    """
    longest_trained, longest_tested = config.longest_trained, config.longest_tested
    rng = np.random.default_rng(config.seed)

    def held_out(count: int, shortest: int, longest: int) -> np.ndarray:
        return np.array(_draw_distinct(lambda: _draw_numbers(rng, HELD_OUT, shortest, longest).tolist(), count))

    valid, test = np.split(held_out(2 * HELD_OUT, SHORTEST_HELD_OUT, longest_trained), 2)
    if split == "valid":
        return valid
    if split == "test":
        return held_out(HELD_OUT, longest_trained + 1, longest_tested) if longest_tested > longest_trained else test
    draws = _draw_numbers(rng, 2 * config.num_pairs, 1, longest_trained)
    draws = draws[~np.isin(draws, [valid, test])]
    return np.concatenate([np.arange(ALWAYS_TRAINED), draws])[: config.num_pairs]


def draw_lines(split: str, config) -> list[str]:
    """Draws the sources of a split, such as "q e h". All lengths are equally likely, and no line is in two splits.

    train has `config.num_pairs` lines of at most `config.longest_trained` symbols; a line may occur twice. valid and
    test have HELD_OUT lines each, of SHORTEST_HELD_OUT to `longest_trained` symbols. If `config.longest_tested` is
    larger than `longest_trained`, all lines of test have more than `longest_trained` symbols, and at most
    `longest_tested`. train and valid are then the same for every `longest_tested`.
    """
    num_pairs, longest_trained, longest_tested = config.num_pairs, config.longest_trained, config.longest_tested
    for_valid, for_test, for_train = (np.random.default_rng((config.seed, part)) for part in range(3))
    shortest = longest_trained + 1 if longest_tested > longest_trained else SHORTEST_HELD_OUT
    valid = _draw_distinct(lambda: _draw_lines(for_valid, HELD_OUT, SHORTEST_HELD_OUT, longest_trained), HELD_OUT)
    test = _draw_distinct(lambda: _draw_lines(for_test, HELD_OUT, shortest, longest_tested), HELD_OUT, {*valid})
    if split != "train":
        return valid if split == "valid" else test
    held_out = {*valid, *test}
    train: list[str] = []
    while len(train) < num_pairs:
        train += [line for line in _draw_lines(for_train, num_pairs, 1, longest_trained) if line not in held_out]
    return train[:num_pairs]


def _draw_distinct(draw: Callable[[], Iterable[Item]], count: int, others: Container[Item] = ()) -> list[Item]:
    """Draws until there are `count` different items that are not in `others`. Keeps the order of drawing."""
    found: dict[Item, None] = {}
    while len(found) < count:
        found |= dict.fromkeys(item for item in draw() if item not in others)
    return list(found)[:count]


def _draw_numbers(rng: np.random.Generator, size: int, shortest: int, longest: int) -> np.ndarray:
    digits = rng.integers(shortest, longest, size, endpoint=True)
    return rng.integers(np.where(digits == 1, 0, 10 ** (digits - 1)), 10**digits)


def _draw_lines(rng: np.random.Generator, size: int, shortest: int, longest: int) -> list[str]:
    lengths = rng.integers(shortest, longest, size, endpoint=True)
    letters = SYMBOLS[rng.integers(len(SYMBOLS), size=lengths.sum())]
    return [" ".join(line) for line in np.split(letters, np.cumsum(lengths)[:-1])]


def number_pairs(config, split: str) -> Pairs:
    """Returns number words in both languages, which are spelt when they are read."""
    _require_sizes(config, MOST_DIGITS, "digits")
    languages = config.source_language, config.target_language
    numbers = split_numbers(split, config)
    for language in languages:
        _number_words(int(numbers.max()), language)
    version = importlib.metadata.version("num2words")
    described = f"numbers {split} {languages} {version}".encode() + numbers.astype("<i8").tobytes()

    def read(indices: Sequence[int]) -> list[tuple[str, str]]:
        source, target = languages
        chosen = (int(numbers[i]) for i in indices)
        return [(_number_words(number, source), _number_words(number, target)) for number in chosen]

    return Pairs(hashlib.sha256(described).hexdigest(), len(numbers), read)


def _number_words(number: int, language: str) -> str:
    try:
        return num2words(number, lang=language)
    except (NotImplementedError, OverflowError, TypeError) as error:  # num2words lacks the language or large numbers
        raise UserError(
            f"num2words cannot spell {number:,} in {language!r}; it can in 'en', 'de', 'fr' and others: set "
            "--config.data.source_language or target_language, or lower longest_tested"
        ) from error


def symbol_pairs(config, split: str) -> Pairs:
    """Returns lines of letters, paired with the same line (source "copy") or the reversed line (source "reverse")."""
    _require_sizes(config, MOST_SYMBOLS, "symbols")
    lines, step = draw_lines(split, config), -1 if config.source == "reverse" else 1

    def read(indices: Sequence[int]) -> list[tuple[str, str]]:
        return [(lines[i], lines[i][::step]) for i in indices]

    fingerprint = hashlib.sha256("\n".join([config.source, split, *lines]).encode()).hexdigest()
    return Pairs(fingerprint, len(lines), read)


def _require_sizes(config, longest: int, unit: str) -> None:
    if config.num_pairs < 1:
        raise UserError(
            f"config.data.num_pairs is {config.num_pairs}; source {config.source!r} makes as many training pairs, so "
            "it must be at least 1"
        )
    if not SHORTEST_HELD_OUT <= config.longest_trained <= config.longest_tested <= longest:
        raise UserError(
            f"config.data.longest_trained is {config.longest_trained} and longest_tested {config.longest_tested}; "
            f"source {config.source!r} needs {SHORTEST_HELD_OUT} <= longest_trained <= longest_tested <= {longest:,} "
            f"{unit}"
        )

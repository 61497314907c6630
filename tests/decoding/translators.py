"""Translators of untrained models, with a tokenizer of letters."""

import dataclasses
import functools
import string

import jax
import numpy as np
import pytest

from tests.conftest import TINY
from transformer_flax.data.normalisation import PLAIN
from transformer_flax.decoding.settings import Settings
from transformer_flax.decoding.translator import Translation, Translator
from transformer_flax.model.registry import init_params, make_model
from transformer_flax.special_tokens import NUM_SPECIAL


class Characters:
    """A tokenizer of which each character is a token: a text that is read again has the tokens it was written with."""

    def __init__(self, characters: str):
        assert len(characters) == TINY.vocab_size - NUM_SPECIAL
        self._characters = characters

    def encode(self, texts):
        return [[NUM_SPECIAL + self._characters.index(c) for c in text] for text in texts]

    def decode(self, ids):
        return "".join(self._characters[i - NUM_SPECIAL] for i in ids if i >= NUM_SPECIAL)


LETTERS = Characters(string.ascii_lowercase)
ONE = dataclasses.replace(TINY, num_layers=1)
OTHER = dataclasses.replace(TINY, num_layers=1, d_model=20, num_heads=2, pre_norm=True)
# Of two widths; the last window of 3 is all blank. Most of the time of these tests is compilation, for each setting and
# width once: where one width will do, they use WORDS.
LINES = ["abc", "", "hello", "thequickbrownfoxjumpsover", " \t", "zz", "hello", "a", "aardvark", "\u2028", "", "\x1c"]
WORDS = ["abc", "hello", "zz", "a", "aardvark"]
EMPTY = [Translation("", 0.0, 0.0, ())]
SETTINGS = {
    "beam_size": 3,
    "nbest": 3,
    "length_penalty": "gnmt",
    "alpha": 0.6,
    "min_length": 0,
    "max_extra_length": 5,
    "max_input_length": 32,
    "batch_size": 4,
    "window": 100,
    "num_devices": 1,
}
GREEDY = {"beam_size": 1, "nbest": 1}


@functools.cache
def large_params(config):
    # Larger weights than a fresh model's: translations then depend on the source and differ from each other.
    return jax.tree.map(lambda x: 2 * x, init_params(config, jax.random.key(1)))


def new(configs=(ONE,), tokenizer=LETTERS, normalise=(PLAIN, PLAIN), **changes) -> Translator:
    params = [large_params(config) for config in configs]
    models, settings = [make_model(config) for config in configs], Settings(**SETTINGS | changes)
    return Translator(models, params, tokenizer, normalise, settings=settings)


make = functools.cache(new)  # with its compiled programs; to be changed by no test


def found(lines, prefixes="", **changes) -> list[list[Translation]]:
    return list(make(**changes).search(lines, prefixes=prefixes))


def texts(translations) -> list[list[str]]:
    return [[t.text for t in of_line] for of_line in translations]


def scores_of(translations) -> np.ndarray:
    return np.array([t.score for of_line in translations for t in of_line])


def assert_scored(translator: Translator, line: str, translations: list[Translation]):
    scores = translator.score([line] * len(translations), [t.text for t in translations])
    for t, log_probs in zip(translations, scores, strict=True):
        assert len(log_probs) == len(t.tokens)
        assert sum(log_probs) == pytest.approx(t.log_prob, rel=1e-6, abs=1e-4)

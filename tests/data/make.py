"""Data made on the spot for the tests of this folder."""

import hashlib

import numpy as np

from configs.base import get_config
from transformer_flax.data.corpus import Corpus, Sentences
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL


def data_config(**fields):
    """`config.data` with these fields changed; only fields that there are."""
    config = get_config().data
    config.update(fields)
    return config


class ListPairs(list):
    """Pairs from a list."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(list(self)).encode()).hexdigest()

    def read(self, indices):
        return [self[i] for i in indices]


def sentences_of(lengths) -> Sentences:
    """Sentence i is (NUM_SPECIAL + i) over and over, closed by the end symbol, `lengths[i]` tokens with it."""
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32) + NUM_SPECIAL, lengths)
    ids[offsets[1:] - 1] = END_ID
    return Sentences(ids, offsets)


def corpus_of(source_lengths, target_lengths) -> Corpus:
    return Corpus(sentences_of(source_lengths), sentences_of(target_lengths))

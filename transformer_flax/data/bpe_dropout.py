"""BPE-dropout (Provilkov et al., 2020): splits the same words into different pieces in every epoch.

A spelling of a word is a sequence of pieces. Before training, SPELLINGS - 1 spellings are drawn for each distinct word
of the training text. An epoch chooses one of these spellings for each word of the text, by a hash of the seed, the
epoch and the word's position. The pieces of a sentence depend on nothing else, so any process can make the batches, in
any order.
"""

import array
import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from transformer_flax.data.corpus import Corpus, Sentences, blocks, ranges
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.special_tokens import END_ID

SPELLINGS = 32  # of a word: the tokenizer's own spelling and SPELLINGS - 1 drawn spellings
MOST_PIECES = 64  # a word of this many pieces or more gets no drawn spellings: drawing takes quadratic time
ROOM = 2.0  # a sentence has room for its mean drawn length plus this many standard deviations


def split_with_dropout(word: str, ranks: Mapping[tuple[str, str], int], rate: float, rng: random.Random) -> list[str]:
    """Merges the letters of a word as BPE does, but skips each possible merge with probability `rate` at each step.

    Algorithm 1 of Provilkov et al.
    """
    pieces = list(word)
    while len(pieces) > 1:
        pairs = enumerate(itertools.pairwise(pieces))
        merges = [(ranks[pair], i) for i, pair in pairs if pair in ranks and rng.random() >= rate]
        if not merges:
            break
        _, i = min(merges)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


@dataclasses.dataclass(frozen=True)
class Respelt:
    """The sentences of one side with the spellings of one epoch. Batches read them like `Sentences`."""

    words: Sentences  # word numbers instead of tokens; the end symbol is a word too
    spellings: Sentences  # of word w: from w * SPELLINGS on, the tokenizer's own spelling first
    room: Sentences  # its lengths are the most tokens that each sentence may have
    key: np.uint64

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each of these sentences, the end symbol included: int64 [len(indices)]."""
        return self.choose(indices)[1]

    def tokens(self, indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the first `lengths` tokens of each of these sentences, concatenated: [sum of lengths]."""
        spellings, whole, _ = self.choose(indices)
        tokens = self.spellings.tokens(spellings, self.spellings.lengths_of(spellings))
        return tokens[ranges(np.cumsum(whole) - whole, lengths)]

    def __getitem__(self, index) -> np.ndarray:
        return self.tokens(np.array([index]), self.lengths_of(np.array([index])))

    def choose(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Chooses the spelling of each word of these sentences.

        A sentence without room for its drawn spellings keeps the tokenizer's own spellings. Returns the spelling of
        each word, the number of tokens of each sentence, and whether each sentence had no room.
        """
        counts = self.words.lengths_of(indices)
        places = ranges(self.words.offsets[indices], counts)
        own = self.words.ids[places] * SPELLINGS
        bits = _mix(places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self.key)
        drawn = own + 1 + (bits % np.uint64(SPELLINGS - 1)).astype(np.int64)
        too_long = _sums(self.spellings.lengths_of(drawn), counts) > self.room.lengths_of(indices)
        spellings = np.where(np.repeat(too_long, counts), own, drawn)
        return spellings, _sums(self.spellings.lengths_of(spellings), counts), too_long


class Epoch(NamedTuple):
    """The pairs with the spellings of one epoch."""

    source: Respelt
    target: Respelt


class BpeDropout:
    """Spells the pairs of a corpus anew in each epoch. The tokenizer must be a byte-level BPE.

    Args:
      rate: the probability of skipping a merge.
      max_length: the most tokens of a sentence; a sentence with more tokens in the tokenizer's own spelling keeps them.
      seed: `config.data.seed`, which determines the drawn spellings.
      progress: called with the number of distinct words that are spelt, and of all.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        rate: float,
        max_length: int,
        seed: int,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ):
        ranks = {pair: rank for rank, pair in enumerate(tokenizer.merges())}
        pieces, rng = tokenizer.vocabulary(), random.Random(seed)
        ids = {piece: i for i, piece in enumerate(pieces)}
        added = tokenizer.added()  # not made by merges
        begins = np.array([piece.startswith("\u0120") for piece in pieces])  # begins with a space, so it starts a word
        begins[END_ID] = True
        known: dict[bytes, int] = {}
        self._words = [_words(side, begins, known) for side in (corpus.source, corpus.target)]
        dtype = corpus.source.ids.dtype
        tokens, lengths = array.array(dtype.char), array.array("I")  # lists of lists take several times the memory
        for number, word in enumerate(known):
            progress(number, len(known))
            own = np.frombuffer(word, dtype).tolist()
            is_varied = len(own) < MOST_PIECES and added.isdisjoint(own)
            parts = tokenizer.words([pieces[i] for i in own]) if is_varied else []
            drawn = (
                [ids[piece] for part in parts for piece in split_with_dropout(part, ranks, rate, rng)]
                for _ in range(SPELLINGS - 1)
            )
            for spelling in itertools.chain([own], drawn):
                tokens.extend(spelling or own)
                lengths.append(len(spelling or own))
        offsets = np.concatenate([[0], np.cumsum(np.array(lengths), dtype=np.int64)])
        self._spellings = Sentences(np.array(tokens, dtype), offsets)
        self.room = Corpus(*(self._room(words, max_length) for words in self._words))

    def _room(self, words: Sentences, max_length: int) -> Sentences:
        """Returns sentences without tokens; their lengths are the room of each sentence."""
        lengths = self._spellings.lengths.reshape(-1, SPELLINGS)
        of_words = lengths[:, 0], lengths[:, 1:].mean(axis=1), lengths[:, 1:].var(axis=1)
        own, mean, variance = (_sums(each[words.ids], words.lengths) for each in of_words)
        room = np.minimum(np.ceil(mean + ROOM * np.sqrt(variance)), max_length).astype(np.int64)
        return Sentences(np.empty(0, np.uint16), np.concatenate([[0], np.cumsum(np.maximum(room, own))]))

    def epoch(self, seed: int, epoch: int) -> Epoch:
        """Returns the pairs with the spellings of this epoch, in a run with this seed."""
        keys = np.random.SeedSequence((seed, epoch)).generate_state(2, np.uint64)
        sides = zip(self._words, (self.room.source, self.room.target), keys, strict=True)
        return Epoch(*(Respelt(words, self._spellings, room, key) for words, room, key in sides))

    def too_long(self, indices: np.ndarray, seed: int) -> int:
        """Counts the sentences of these pairs without room for their drawn spellings in the first epoch."""
        sides = self.epoch(seed, 0)
        return sum(int(side.choose(indices[block])[2].sum()) for side in sides for block in blocks(len(indices)))


def _words(sentences: Sentences, begins: np.ndarray, known: dict[bytes, int]) -> Sentences:
    """Returns the sentences as word numbers. Adds each new word to `known`, which maps token ids to word numbers."""
    first = begins[sentences.ids]
    first[sentences.offsets[:-1]] = True
    starts = np.flatnonzero(first)
    content, size = sentences.ids.tobytes(), sentences.ids.itemsize
    ends, numbers = np.append(starts[1:], len(first)), np.empty(len(starts), np.int64)
    for block in blocks(len(starts)):  # lists of the whole text would take much memory
        spans = zip((starts[block] * size).tolist(), (ends[block] * size).tolist(), strict=True)
        numbers[block] = [known.setdefault(content[start:end], len(known)) for start, end in spans]
    return Sentences(numbers, np.searchsorted(starts, sentences.offsets))


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the sum of the first counts[0] values, the sum of the next counts[1] values, and so on."""
    total, ends = np.concatenate([[0], np.cumsum(values)]), np.cumsum(counts)
    return total[ends] - total[ends - counts]


def _mix(x: np.ndarray) -> np.ndarray:
    """Hashes each number to 64 bits. Every bit of the hash depends on all bits of the number (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

"""BPE-dropout (Provilkov et al., 2020): the same words are spelt with other pieces in every epoch.

Each distinct word of the training text is spelt SPELLINGS - 1 times before training. An epoch chooses one of these for
each word of the text, by a hash of the seed, the epoch and the word's place. The pieces of a sentence depend on nothing
else, so batches can be made in any order and by any process.
"""

import array
import dataclasses
import itertools
import random
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from transformer_flax.data.corpus import Corpus, Sentences, blocks, ranges
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.special_tokens import END_ID

SPELLINGS = 32  # of a word: the tokenizer's own, and others
LONGEST = 64  # pieces of a word that has others: each takes quadratic time
ROOM = 2.0  # standard deviations above the mean length that a sentence has room for


def spell(word: str, ranks: Mapping[tuple[str, str], int], rate: float, rng: random.Random) -> list[str]:
    """Merges the letters of a word as BPE does, but leaves each merge out with probability `rate` at each step.

    Algorithm 1 of the paper.
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
    """The sentences of one side as an epoch spells them; batches read them as they read `Sentences`."""

    words: Sentences  # numbers of words in place of tokens; the end symbol is one of them
    spellings: Sentences  # those of word w from w * SPELLINGS on, the tokenizer's own first
    room: Sentences  # as many tokens as each sentence may have
    key: np.uint64

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of these sentences, the end symbol included: int64 [len(indices)]."""
        return self.spell(indices)[1]

    def tokens(self, indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The first `lengths` tokens of each of these sentences, concatenated: [sum of lengths]."""
        spellings, whole, _ = self.spell(indices)
        tokens = self.spellings.tokens(spellings, self.spellings.lengths_of(spellings))
        return tokens[ranges(np.cumsum(whole) - whole, lengths)]

    def __getitem__(self, index) -> np.ndarray:
        return self.tokens(np.array([index]), self.lengths_of(np.array([index])))

    def spell(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The spelling of each word of these sentences, the tokens of each sentence, and whether it had no room.

        A sentence without room for the drawn pieces keeps the tokenizer's own.
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
    """The pairs as an epoch spells them."""

    source: Respelt
    target: Respelt


class BpeDropout:
    """Spells the pairs of a corpus anew in each epoch.

    Args:
      corpus: the pairs as the tokenizer spells them.
      tokenizer: a byte-level BPE.
      rate: probability that a merge is left out.
      max_length: tokens that a sentence may have, unless the tokenizer's own pieces are more.
      seed: `config.data.seed`, of the spellings.

    Raises:
      UserError: the tokenizer is of another kind.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, rate: float, max_length: int, seed: int):
        ranks = {pair: rank for rank, pair in enumerate(tokenizer.merges())}
        pieces, rng = tokenizer.vocabulary(), random.Random(seed)
        ids = {piece: i for i, piece in enumerate(pieces)}
        begins = np.array([piece.startswith("\u0120") for piece in pieces])  # with a blank
        begins[END_ID] = True
        known: dict[bytes, int] = {}
        self._words = [_words(side, begins, known) for side in (corpus.source, corpus.target)]
        dtype = corpus.source.ids.dtype
        tokens, lengths = array.array(dtype.char), array.array("I")  # lists of lists take several times the memory
        for word in known:
            own = np.frombuffer(word, dtype).tolist()
            parts = tokenizer.words([pieces[i] for i in own]) if own != [END_ID] and len(own) < LONGEST else []
            drawn = (
                [ids[piece] for part in parts for piece in spell(part, ranks, rate, rng)] for _ in range(SPELLINGS - 1)
            )
            for spelling in itertools.chain([own], drawn):
                tokens.extend(spelling or own)
                lengths.append(len(spelling or own))
        offsets = np.concatenate([[0], np.cumsum(np.array(lengths), dtype=np.int64)])
        self._spellings = Sentences(np.array(tokens, dtype), offsets)
        self.room = Corpus(*(self._room(words, max_length) for words in self._words))

    def _room(self, words: Sentences, max_length: int) -> Sentences:
        """Sentences without tokens, of the lengths that there is room for."""
        lengths = self._spellings.lengths.reshape(-1, SPELLINGS)
        of_words = lengths[:, 0], lengths[:, 1:].mean(axis=1), lengths[:, 1:].var(axis=1)
        own, mean, variance = (_sums(each[words.ids], words.lengths) for each in of_words)
        room = np.minimum(np.ceil(mean + ROOM * np.sqrt(variance)), max_length).astype(np.int64)
        return Sentences(np.empty(0, np.uint16), np.concatenate([[0], np.cumsum(np.maximum(room, own))]))

    def epoch(self, seed: int, epoch: int) -> Epoch:
        """The pairs as an epoch of the run with this seed spells them."""
        keys = np.random.SeedSequence((seed, epoch)).generate_state(2, np.uint64)
        sides = zip(self._words, (self.room.source, self.room.target), keys, strict=True)
        return Epoch(*(Respelt(words, self._spellings, room, key) for words, room, key in sides))

    def too_long(self, indices: np.ndarray, seed: int) -> int:
        """Counts the sentences of these pairs for whose drawn pieces the first epoch has no room."""
        sides = self.epoch(seed, 0)
        return sum(int(side.spell(indices[block])[2].sum()) for side in sides for block in blocks(len(indices)))


def _words(sentences: Sentences, begins: np.ndarray, known: dict[bytes, int]) -> Sentences:
    """Sentences as numbers of words. `known` has the number of each word, by its token ids, and is added to."""
    first = begins[sentences.ids]
    first[sentences.offsets[:-1]] = True
    starts = np.flatnonzero(first)
    content, size = sentences.ids.tobytes(), sentences.ids.itemsize
    spans = itertools.pairwise([*(starts * size).tolist(), len(content)])
    numbers = (known.setdefault(content[start:end], len(known)) for start, end in spans)
    return Sentences(np.fromiter(numbers, np.int64, len(starts)), np.searchsorted(starts, sentences.offsets))


def _sums(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The sums of the first counts[0] values, of the next counts[1], and so on."""
    total, ends = np.concatenate([[0], np.cumsum(values)]), np.cumsum(counts)
    return total[ends] - total[ends - counts]


def _mix(x: np.ndarray) -> np.ndarray:
    """Hashes each number into 64 bits that all depend on all of its own (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

"""Text to integers and back: byte-level BPE over both languages, lossless, one JSON file."""

import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers

from transformer_flax.data.pairs import Pairs
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL

SPECIAL_TOKENS = ["<pad>", "<begin>", "<end>"]  # ids 0, 1, 2
ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()
SMALLEST_VOCABULARY = NUM_SPECIAL + len(ALPHABET)


class Tokenizer:
    """A shared vocabulary of byte-level word-pieces.

    `decode(encode(text)) == text` for every string. A space is put before the text and taken off again, so that a word
    has the same pieces at the start of a sentence as within it.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        # Not saved with the file; without it, a literal "<end>" in a text would become the control token.
        self._backend.encode_special_tokens = True
        self.vocab_size = backend.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, show_progress: bool = False) -> "Tokenizer":
        """The same texts in the same order give the same file. The vocabulary is smaller where texts are few."""
        if vocab_size < SMALLEST_VOCABULARY:
            raise UserError(
                f"config.data.vocab_size is {vocab_size}; byte-level BPE needs at least {SMALLEST_VOCABULARY}: "
                "256 bytes and 3 special tokens"
            )
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=ALPHABET,
            show_progress=show_progress,
        )
        backend.train_from_iterator((f" {text}" for text in texts), trainer)
        return cls(backend)

    @classmethod
    def load(cls, file: pathlib.Path) -> "Tokenizer":
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception, for a missing file as for a spoilt one
            raise UserError(f"{file} cannot be read as a tokenizer: {error}") from error

    def to_json(self) -> str:
        return self._backend.to_str(pretty=True)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without begin and end; an empty text has none."""
        encodings = self._backend.encode_batch_fast([f" {text}" if text else "" for text in texts])
        return [encoding.ids for encoding in encodings]

    def pieces(self, text: str) -> list[str]:
        """The word-pieces of a text as the vocabulary spells them, bytes as letters, and the end symbol."""
        return [*self._backend.encode(f" {text}" if text else "").tokens, SPECIAL_TOKENS[END_ID]]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special ones left out. Bytes that are not UTF-8 become U+FFFD."""
        text = self._backend.decode([int(i) for i in ids if i >= NUM_SPECIAL], skip_special_tokens=False)
        return text.removeprefix(" ")


def sample_texts(pairs: Pairs, max_pairs: int, seed: int) -> Iterator[str]:
    """Both sides of at most `max_pairs` pairs, a sample that depends on the pairs and the seed alone."""
    indices = np.arange(len(pairs))
    if len(indices) > max_pairs:
        indices = np.sort(np.random.default_rng(seed).choice(indices, max_pairs, replace=False))
    for index in indices.tolist():
        yield from pairs[index]

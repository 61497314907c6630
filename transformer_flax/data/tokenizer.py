"""Converts text to token ids and back, with one vocabulary for both languages, stored as one JSON file."""

import collections
import contextlib
import hashlib
import itertools
import json
import logging
import pathlib
import unicodedata
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from transformer_flax.data.sentence_pairs import Pairs, iterate_pairs
from transformer_flax.errors import UserError
from transformer_flax.files import cache_error, cache_root, read_bounded, write_whole
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL

LOSSLESS = ("bpe", "wordpiece")
TOKENIZERS = (*LOSSLESS, "words")
SPECIAL_TOKENS = ["<pad>", "<begin>", "<end>"]  # ids 0, 1, 2
UNKNOWN = "<unknown>"  # the piece for rare words in a vocabulary of "words"
ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()
SMALLEST_VOCABULARY = NUM_SPECIAL + len(ALPHABET)
JOINERS = "\u200c\u200d"  # invisible, between letters of some scripts
LETTER = rf"[\p{{L}}\p{{M}}{JOINERS}]"  # within a word, a mark is a part of a letter: in many scripts, a vowel
# GPT-2's words. GPT-2 itself ends a word before a mark or joiner.
BPE_WORDS = rf"'(?:[stmd]|re|ve|ll)(?!\p{{M}})| ?\p{{L}}{LETTER}*| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
WORD = 32  # maximum letters of a word for word-pieces: finding the longest piece takes quadratic time
LETTERS = rf"\p{{L}}{LETTER}{{0,{WORD - 1}}}"
APOSTROPHE = "['\u2019]"
CONTRACTION = r"(?:[stmd]|re|ve|ll)(?![\p{L}\p{M}])"
WORDS = "|".join(
    (
        rf"{APOSTROPHE}{CONTRACTION}",  # is n't, we 'll, the house 's
        rf" ?(?>{LETTERS}){APOSTROPHE}(?!{CONTRACTION})(?=\p{{L}})",  # l' homme, qu' elle
        rf" ?{LETTERS}",
        rf" ?\p{{N}}{{1,{WORD}}}",
        rf" ?[^\s\p{{L}}\p{{N}}]{{1,{WORD}}}",
        rf"\s{{1,{WORD}}}(?!\S)",  # of several spaces, the last belongs to the next word
        r"\s",
    )
)
WORD_BYTES = 4 * (WORD + 2)  # with a space and an apostrophe, in UTF-8
PROBE = f"a {' '.join(SPECIAL_TOKENS)} \U0010ffff"  # ends with an unassigned character, which few vocabularies have
TRAINING_VERSION = "2"  # increase when the same text and config would give another tokenizer

logger = logging.getLogger(__name__)


class Tokenizer:
    """A shared vocabulary of word pieces, trained by `train` or read from a JSON file of Hugging Face's tokenizers.

    If `train` made the tokenizer and its kind is in LOSSLESS, `decode(encode(text)) == text` for every string. `encode`
    adds a space before a text, and `decode` removes the space. So a word has the same pieces at the start of a sentence
    as within a sentence.

    A tokenizer from elsewhere may lose information, such as capital letters. The space is added only if this tokenizer
    treats spaces in the same way. Its own special tokens, padding and truncation are ignored.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        # The file does not store this setting. Without it, a literal "<end>" in a text would become the special token.
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        self._space = ""
        word, two_words, spaced = (self._encode([text])[0].ids for text in ("a", "a a", " a"))
        # True if a word after a space has the same pieces as within a sentence, and decoding keeps the space.
        if two_words == word + spaced and self.decode(spaced) == " a":
            self._space = " "
        self.vocab_size = backend.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, kind: str = "bpe") -> "Tokenizer":
        """Trains a vocabulary. The same texts in the same order give the same file.

        "bpe" starts from the 256 bytes and repeatedly merges the most frequent pair of pieces. To split a word into
        pieces, it repeats these merges.

        "wordpiece" learns the vocabulary in the same way. It splits a word from left to right and always takes the
        longest piece that fits (Wu et al. 2016, the paper's source for word-pieces). The space before a word marks its
        start. Usual word-pieces lose unknown characters, very long words and repeated spaces. These word-pieces include
        all bytes and cut long words, so they lose nothing. They also keep the apostrophe of an elided word with the
        word (l' homme, qu' elle). "bpe" makes such an apostrophe a token of its own: 5 % of the tokens of a French
        text.

        "words" is for classification. A run of letters and digits, or a run of other signs, is one piece if it occurs
        more than once. All other words share the piece UNKNOWN. UNKNOWN is trained too, so a model treats a word that
        it has never seen like a word that occurred once.

        Args:
          texts: sentences of both languages.
          vocab_size: maximum number of pieces and special tokens; few texts give fewer. At least `smallest_vocabulary`.
          kind: one of TOKENIZERS.
        """
        if kind == "words":
            return cls(_whole_words(texts, vocab_size))
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        # No word has both letters and "<", so "<end>" in a text is never found in the vocabulary.
        words = tokenizers.Regex(BPE_WORDS if kind == "bpe" else WORDS)
        split = tokenizers.pre_tokenizers.Split(words, "isolated")
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=ALPHABET, show_progress=False
        )
        backend.train_from_iterator((f" {text}" for text in texts), trainer)
        if kind == "wordpiece":  # the library's own trainer of word-pieces numbers them in no fixed order
            backend.model = tokenizers.models.WordPiece(
                backend.get_vocab(),
                unk_token=UNKNOWN,  # not in the vocabulary, so the library would raise an error rather than lose text
                continuing_subword_prefix="",
                max_input_chars_per_word=WORD_BYTES,
            )
        return cls(backend)

    @classmethod
    def load(cls, file: pathlib.Path) -> "Tokenizer":
        """Reads a tokenizer from a JSON file and tests it on a text.

        Raises:
          UserError: the file cannot be read or used; gives the file and the reason.
        """
        try:
            content = read_bounded(file)
            with _explained("Hugging Face's library refuses it"):
                backend = tokenizers.Tokenizer.from_buffer(content)
            _require_usable(backend)
            tokenizer = cls(backend)
            tokenizer.decode(tokenizer.encode([PROBE])[0])
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{file} cannot be read as a tokenizer: {reason}") from error
        return tokenizer

    def to_json(self) -> str:
        return self._backend.to_str(pretty=True)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, without begin and end symbols. An empty text has no ids.

        Raises:
          UserError: a text is not UTF-8, or a tokenizer from elsewhere fails or produces a special token.
        """
        ids, lengths = self.encode_flat(texts)
        return [ids[end - length : end].tolist() for end, length in zip(np.cumsum(lengths), lengths, strict=True)]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Like `encode`, but concatenated, which is faster for many texts: ids, int32 [all], lengths, int64 [texts]."""
        try:
            encodings = self._encode([self._space + text if text else "" for text in texts])
        except TypeError:
            for text in texts:  # checked only after an error: checking millions of texts takes time
                _require_characters(text)
            raise
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        every = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        ids = np.fromiter(every, np.int32, lengths.sum())
        if len(ids) and ids.min() < NUM_SPECIAL:
            first = int(np.argmax(ids < NUM_SPECIAL))
            text = texts[int(np.searchsorted(np.cumsum(lengths), first, side="right"))]
            raise UserError(
                f"the tokenizer makes the special token {SPECIAL_TOKENS[ids[first]]} of a part of {text[:80]!r}; "
                "special tokens must not stand for text, nor for unknown words"
            )
        return ids, lengths

    def _encode(self, texts: list[str]) -> list[tokenizers.Encoding]:
        with _explained("the tokenizer fails at a text"):
            return self._backend.encode_batch_fast(texts, add_special_tokens=False)

    def pieces(self, text: str) -> list[str]:
        """Returns the pieces of a text as the vocabulary spells them, bytes as letters, and then the end symbol."""
        [ids] = self.encode([text])
        return [*(str(self._backend.id_to_token(i)) for i in ids), SPECIAL_TOKENS[END_ID]]

    def vocabulary(self) -> list[str]:
        """Returns all pieces in the order of their ids, spelt as in `pieces`."""
        return [str(self._backend.id_to_token(i)) for i in range(self.vocab_size)]

    def added(self) -> set[int]:
        """Returns the ids of special tokens and of tokens that were added to the vocabulary."""
        return set(self._backend.get_added_tokens_decoder())

    def merges(self) -> list[tuple[str, str]]:
        """Returns the pairs of pieces that a byte-level BPE merges, the most frequent pair first."""
        parts = json.loads(self.to_json())
        whole = parts["pre_tokenizer"] or {}
        *splits, last = whole.get("pretokenizers") or [whole]
        if all(each["type"] == "Split" for each in splits) and not (splits and last.get("add_prefix_space")):
            parts["pre_tokenizer"] = last
        kinds = {part: (parts[part] or {}).get("type") for part in ("model", "pre_tokenizer", "decoder")}
        if kinds != {"model": "BPE", "pre_tokenizer": "ByteLevel", "decoder": "ByteLevel"}:
            found = ", ".join(f"{part} {kind}" for part, kind in kinds.items())
            raise UserError(
                f"config.data.bpe_dropout is for a byte-level BPE, and this tokenizer has {found}; set it to 0, or "
                "leave out config.data.tokenizer_file or config.init_from"
            )
        return [tuple(pair) for pair in parts["model"]["merges"]]

    def comparable(self) -> dict[str, Any]:
        """Returns the content of the file without its rule for splitting words, which differs between versions."""
        return {**json.loads(self.to_json()), "pre_tokenizer": None}

    def words(self, pieces: Sequence[str]) -> list[str]:
        """Splits the text of pieces into the words that no merge crosses, with bytes as letters."""
        text = self._backend.decoder.decode([*pieces])
        return [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        with _explained("the tokenizer fails at ids"):
            text = self._backend.decode([int(i) for i in ids if i >= NUM_SPECIAL], skip_special_tokens=False)
        return text.removeprefix(self._space)


def is_mark(character: str) -> bool:
    """Returns whether a character belongs to the letter before it: a vowel sign, an accent, or a joiner."""
    return unicodedata.category(character).startswith("M") or character in JOINERS


def starts_with_letter(text: str) -> bool:
    """Returns whether a text begins with a letter, a digit, or a mark on a letter."""
    return text != "" and (text[0].isalnum() or is_mark(text[0]))


def smallest_vocabulary(kind: str) -> int:
    """Returns the smallest allowed `vocab_size` for a kind of tokenizer."""
    return SMALLEST_VOCABULARY if kind in LOSSLESS else NUM_SPECIAL + 2  # UNKNOWN and one word


def _whole_words(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    split = tokenizers.pre_tokenizers.Whitespace()  # splits "<end>" into three words, never the special token
    counts = collections.Counter(word for text in texts for word, _ in split.pre_tokenize_str(text))
    frequent = sorted((word for word, count in counts.items() if count > 1), key=lambda word: (-counts[word], word))
    pieces = [*SPECIAL_TOKENS, UNKNOWN, *frequent][:vocab_size]
    ids = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=UNKNOWN))
    backend.pre_tokenizer = split
    return backend


def _require_characters(text: str) -> None:
    """Refuses a lone surrogate (half a character), which a str can hold but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"a text is {text[:80]!r}, which is not UTF-8 ({error.reason} at {error.start})") from error


def _require_usable(backend: tokenizers.Tokenizer) -> None:
    """Checks that the ids fit a model, and that a text always has the same ids."""
    vocabulary = backend.get_vocab()
    if [backend.id_to_token(i) for i in range(NUM_SPECIAL)] != SPECIAL_TOKENS:
        found = ", ".join(str(backend.id_to_token(i)) for i in range(NUM_SPECIAL))
        raise UserError(f"its ids 0, 1, 2 are {found}; they must be {', '.join(SPECIAL_TOKENS)}")
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise UserError(
            f"it has {len(vocabulary):,} tokens and ids up to {max(vocabulary.values()):,}; its ids must be those from "
            f"0 to {len(vocabulary) - 1:,}, each of one token"
        )
    if dropout := getattr(backend.model, "dropout", None):
        raise UserError(f"its dropout is {dropout}: a text would have other ids each time; it must be null")


@contextlib.contextmanager
def _explained(what: str) -> Generator[None]:
    """Turns an error of the library (a bare Exception or a Rust panic) into a UserError. A context manager."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__name__ == "PanicException":
            raise UserError(f"{what}: {error}") from error
        raise


def sample_texts(
    pairs: Pairs,
    max_pairs: int,
    seed: int,
    *,
    sources_only: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[str]:
    """Yields the texts of a sample of at most `max_pairs` pairs.

    The sample depends only on `pairs`, `max_pairs` and `seed`, which is `config.data.seed`. `sources_only` leaves out
    the targets, which are labels. `progress` is called with (pairs read, pairs in the sample).
    """
    indices = range(len(pairs))
    if len(indices) > max_pairs:
        indices = np.sort(np.random.default_rng(seed).choice(len(pairs), max_pairs, replace=False))
    done = 0
    for chunk in iterate_pairs(pairs, indices):
        for pair in chunk:
            yield from pair[:1] if sources_only else pair
        done += len(chunk)
        progress(done, len(indices))


def cached_tokenizer(pairs: Pairs, config, train: Callable[[], Tokenizer], *, sources_only: bool = False) -> Tokenizer:
    """Returns the tokenizer of these pairs and `config.data` from the cache, or trains and keeps it.

    Removes a damaged file with a warning.
    """
    settings = [config.tokenizer, config.vocab_size, config.tokenizer_sample, config.seed]
    sides = ["sources"] if sources_only else []
    known = json.dumps([TRAINING_VERSION, tokenizers.__version__, pairs.fingerprint, *settings, *sides])
    key = hashlib.sha256(known.encode()).hexdigest()[:32]
    folder = cache_root(config.cache_dir) / "tokenizers"
    for file in folder.glob(f"{key}.*.json"):
        if file.name == _cache_name(key, file.read_bytes()):
            return Tokenizer.load(file)
        logger.warning("the tokenizer in %s is damaged and is made anew", file)
        file.unlink(missing_ok=True)
    tokenizer = train()
    content = tokenizer.to_json().encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _cache_name(key, content), content)
    except OSError as error:
        raise cache_error("the tokenizer", f"{len(content) / 1e6:,.1f} MB", folder, error) from error
    return tokenizer


def _cache_name(key: str, content: bytes) -> str:
    """Returns the file name, which includes a checksum of the content."""
    return f"{key}.{zlib.crc32(content):08x}.json"

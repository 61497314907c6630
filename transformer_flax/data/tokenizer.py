"""Text to integers and back: byte-level pieces of words of both languages, lossless, or words; one JSON file."""

import collections
import contextlib
import hashlib
import itertools
import json
import logging
import pathlib
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from transformer_flax.data.sources import Pairs, read_pairs
from transformer_flax.data.text_files import require_characters
from transformer_flax.errors import UserError
from transformer_flax.files import cache_root, read_json
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL

LOSSLESS = ("bpe", "wordpiece")
KINDS = (*LOSSLESS, "words")
SPECIAL_TOKENS = ["<pad>", "<begin>", "<end>"]  # ids 0, 1, 2
UNKNOWN = "<unknown>"  # of "words", which have no piece for a word that is rare
ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()
SMALLEST_VOCABULARY = NUM_SPECIAL + len(ALPHABET)
LARGEST = 1 << 26  # bytes of a file
SAMPLE_BLOCK = 4096  # pairs of a sample read at a time
WORD = 32  # letters that word-pieces take for a word, at most: the search for the longest piece is quadratic in it
APOSTROPHE = "['\u2019]"
CONTRACTION = r"(?:[stmd]|re|ve|ll)(?!\p{L})"
WORDS = "|".join(
    (
        rf"{APOSTROPHE}{CONTRACTION}",  # is n't, we 'll, the house 's
        rf" ?(?>\p{{L}}{{1,{WORD}}}){APOSTROPHE}(?!{CONTRACTION})(?=\p{{L}})",  # l' homme, qu' elle
        rf" ?\p{{L}}{{1,{WORD}}}",
        rf" ?\p{{N}}{{1,{WORD}}}",
        rf" ?[^\s\p{{L}}\p{{N}}]{{1,{WORD}}}",
        rf"\s{{1,{WORD}}}(?!\S)",  # of several blanks, the last one belongs to the word
        r"\s",
    )
)
WORD_BYTES = 4 * (WORD + 2)  # with a blank and an apostrophe, in UTF-8
PROBE = f"a {' '.join(SPECIAL_TOKENS)} \U0010ffff"  # an unassigned character, which few vocabularies have


class Tokenizer:
    """A shared vocabulary of pieces of words, which `train` makes or a JSON file of Hugging Face's tokenizers holds.

    Of a LOSSLESS one that was trained here, `decode(encode(text)) == text` for every string. A space is put before the
    text and taken off again, so that a word has the same pieces at the start of a sentence as within it. One from
    elsewhere may lose what it likes, such as capital letters, and has the space only if it treats it in the same way.
    The special tokens, padding and truncation that it asks for are left aside.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        # Not saved with the file; without it, a literal "<end>" in a text would become the control token.
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        self._space = ""
        word, two_words, spaced = (self._encode([text])[0].ids for text in ("a", "a a", " a"))
        # With the space, a word is spelt as it is behind another one, and the space comes back to be taken off.
        if two_words == word + spaced and self.decode(spaced) == " a":
            self._space = " "
        self.vocab_size = backend.get_vocab_size()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, kind: str = "bpe") -> "Tokenizer":
        """Pieces from a text, the most frequent pairs of pieces merged over and over, beginning with the 256 bytes.

        The same texts in the same order give the same file. The vocabulary is smaller where texts are few.

        "bpe" spells a word by repeating these merges. "wordpiece" takes from left to right the longest piece that fits,
        of a vocabulary found in the same way, where the blank before a word marks its start (Wu et al. 2016, the
        paper's source for word-pieces). Usual word-pieces lose characters that their vocabulary lacks, very long words
        and blanks in a row; these have all bytes, and cut long words, so they lose nothing. They also leave an elided
        word its apostrophe (l' homme, qu' elle), which "bpe" makes a token of its own: 5 % of the tokens of a French
        text.

        "words" are for telling texts apart: runs of letters and digits, and of other signs, each a piece if it occurs
        more than once. The others are one piece, which is learned, so that a word never seen is like one seen once; in
        pieces, it would be made of what other rare words have taught.

        Args:
          texts: sentences of both languages.
          vocab_size: pieces and special tokens, at most.
          kind: one of KINDS.

        Raises:
          UserError: there is no such kind, or the vocabulary has no room for every byte, or for a word.
        """
        if kind not in KINDS:
            raise UserError(f"config.data.tokenizer is {kind!r}; it must be one of {', '.join(KINDS)}")
        least = smallest_vocabulary(kind)
        if vocab_size < least:
            needed = "256 bytes" if kind in LOSSLESS else f"{UNKNOWN}, a word"
            raise UserError(
                f"config.data.vocab_size is {vocab_size}; a vocabulary of {kind} needs at least {least}: {needed} and "
                f"{NUM_SPECIAL} special tokens"
            )
        if kind == "words":
            return cls(_whole_words(texts, vocab_size))
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = _words() if kind == "wordpiece" else _byte_level()
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=ALPHABET,
            show_progress=False,
        )
        backend.train_from_iterator((f" {text}" for text in texts), trainer)
        if kind == "wordpiece":  # not by the library's trainer of word-pieces, which numbers them in no fixed order
            backend.model = tokenizers.models.WordPiece(
                backend.get_vocab(),
                unk_token="<unknown>",  # which there is not: the library would raise, and never lose text for it
                continuing_subword_prefix="",
                max_input_chars_per_word=WORD_BYTES,
            )
        return cls(backend)

    @classmethod
    def load(cls, file: pathlib.Path) -> "Tokenizer":
        """The tokenizer of a JSON file, tried out.

        Raises:
          UserError: there is none that can be used, and why.
        """
        try:
            _require_small_ids(read_json(file, largest=LARGEST))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{file} cannot be read as a tokenizer: {reason}") from error
        with _explained(f"{file} cannot be read as a tokenizer of Hugging Face's library"):
            backend = tokenizers.Tokenizer.from_file(str(file))
        try:
            _check(backend)
            with _explained("it fails at a text"):
                require_bounded(backend, PROBE)
            tokenizer = cls(backend)
            tokenizer.decode(tokenizer.encode([PROBE])[0])
        except UserError as error:
            raise UserError(f"{file} cannot be used as a tokenizer: {error}") from error
        return tokenizer

    def to_json(self) -> str:
        return self._backend.to_str(pretty=True)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without begin and end; an empty text has none.

        Raises:
          UserError: a text is not UTF-8, or a tokenizer from elsewhere fails at it, or takes a part of it for a
            special token.
        """
        ids, lengths = self.encode_flat(texts)
        return [ids[end - length : end].tolist() for end, length in zip(np.cumsum(lengths), lengths, strict=True)]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The same in one array, which is faster for many texts: ids, int32 [all], and lengths, int64 [texts].

        Raises:
          UserError: as `encode`.
        """
        try:
            encodings = self._encode([self._space + text if text else "" for text in texts])
        except TypeError:
            for text in texts:  # looked at now alone, as millions of texts are encoded
                require_characters(text, "a text")
            raise
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        every = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        ids = np.fromiter(every, np.int32, lengths.sum())
        if len(ids) and ids.min() < NUM_SPECIAL:
            first = int(np.argmax(ids < NUM_SPECIAL))
            text = texts[int(np.searchsorted(np.cumsum(lengths), first, side="right"))]
            raise UserError(
                f"the tokenizer makes the special token {SPECIAL_TOKENS[ids[first]]} of a part of {text[:80]!r}; "
                "special tokens must not stand for text, nor for what is unknown"
            )
        return ids, lengths

    def _encode(self, texts: list[str]) -> list[tokenizers.Encoding]:
        with _explained("the tokenizer fails at a text"):
            return self._backend.encode_batch_fast(texts, add_special_tokens=False)

    def pieces(self, text: str) -> list[str]:
        """The word-pieces of a text as the vocabulary spells them, bytes as letters, and the end symbol."""
        [ids] = self.encode([text])
        return [*(str(self._backend.id_to_token(i)) for i in ids), SPECIAL_TOKENS[END_ID]]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special ones left out. Bytes that are not UTF-8 become U+FFFD."""
        with _explained("the tokenizer fails at ids"):
            text = self._backend.decode([int(i) for i in ids if i >= NUM_SPECIAL], skip_special_tokens=False)
        return text.removeprefix(self._space)


def _byte_level(*, use_regex: bool = True) -> tokenizers.pre_tokenizers.PreTokenizer:
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _words() -> tokenizers.pre_tokenizers.PreTokenizer:
    """Words for word-pieces. None has both letters and "<", so "<end>" in a text is never found in the vocabulary."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    return tokenizers.pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def smallest_vocabulary(kind: str) -> int:
    """How many pieces and special tokens a vocabulary of that kind has at least."""
    return SMALLEST_VOCABULARY if kind in LOSSLESS else NUM_SPECIAL + 2  # <unknown>, and a word


def _whole_words(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    split = tokenizers.pre_tokenizers.Whitespace()  # "<end>" of a text is three words, and never the control token
    counts = collections.Counter(word for text in texts for word, _ in split.pre_tokenize_str(text))
    frequent = sorted((word for word, count in counts.items() if count > 1), key=lambda word: (-counts[word], word))
    pieces = [*SPECIAL_TOKENS, UNKNOWN, *frequent][:vocab_size]
    ids = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=UNKNOWN))
    backend.pre_tokenizer = split
    return backend


def _require_small_ids(parts: Any) -> None:
    """Refuses ids for which the library would ask for so much memory that the process is ended.

    Raises:
      ValueError: there is one.
    """
    model = parts.get("model") if isinstance(parts, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        for token, number in vocabulary.items():
            if type(number) is not int or not 0 <= number < LARGEST:
                raise ValueError(f"the id of {token[:40]!r} is {str(number)[:40]}")


def _check(backend: tokenizers.Tokenizer) -> None:
    """Refuses what no model could be trained with."""
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
def _explained(what: str) -> Iterator[None]:
    """A context in which the library is used; what it raises, a bare Exception or a panic of Rust, is a UserError."""
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
    """Both sides of at most `max_pairs` pairs, a sample that depends on the pairs and the seed alone.

    With `sources_only`, one side: where the others are labels, and no text.
    `progress` is called with (pairs read, of all in the sample).
    """
    indices = range(len(pairs))
    if len(indices) > max_pairs:
        indices = np.sort(np.random.default_rng(seed).choice(len(pairs), max_pairs, replace=False))
    for start in range(0, len(indices), SAMPLE_BLOCK):
        block = np.asarray(indices[start : start + SAMPLE_BLOCK]).tolist()
        for pair in read_pairs(pairs, block):
            yield from pair[:1] if sources_only else pair
        progress(start + len(block), len(indices))


MOST_STEPS = 100
LONGEST = 100  # characters that a step puts in the place of others
GROWTH = 16  # times the length of a text; the bytes of a character, spelt as letters, are at most 8
CHAINS: dict[str, tuple[type, str, Callable[[Any, str], int]]] = {  # by their names in a tokenizer
    "normalizer": (tokenizers.normalizers.Sequence, "normalizers", lambda chain, text: len(chain.normalize_str(text))),
    "pre_tokenizer": (
        tokenizers.pre_tokenizers.Sequence,
        "pretokenizers",
        lambda chain, text: sum(len(piece) for piece, _ in chain.pre_tokenize_str(text)),
    ),
    "decoder": (tokenizers.decoders.Sequence, "decoders", lambda chain, text: len(chain.decode([text]))),
}


def require_bounded(backend: tokenizers.Tokenizer, text: str) -> None:
    """Tries the steps of a tokenizer, one more each time, at a text and at what these steps themselves put in.

    Raises:
      UserError: they make far more of it, or are too many to be tried.
    """
    for name, (kind, inner, length) in CHAINS.items():
        part = getattr(backend, name)
        steps = list(_steps(json.loads(part.__getstate__()), inner)) if part else []
        if len(steps) > MOST_STEPS:
            raise UserError(f"its {name} has {len(steps):,} steps; at most {MOST_STEPS} are taken")
        contents = [str(step.get("content", "")) for step in steps]
        if (longest := max(map(len, contents), default=0)) > LONGEST:
            raise UserError(f"its {name} puts in {longest:,} characters at once; at most {LONGEST} are taken")
        tried, chain = text + "".join(contents), kind([])
        for count in range(1, len(steps) + 1):
            chain.__setstate__(json.dumps({"type": "Sequence", inner: steps[:count]}).encode())
            if (made := length(chain, tried)) > GROWTH * len(tried):
                raise UserError(f"its {name} makes {made:,} characters of {len(tried):,}; take out what adds them")


def _steps(part: dict[str, Any], inner: str) -> Iterator[dict[str, Any]]:
    if part["type"] == "Sequence":
        for step in part[inner]:
            yield from _steps(step, inner)
    else:
        yield part


TRAINING = "1"  # raise it when the same text and config would give another tokenizer

logger = logging.getLogger(__name__)


def find_tokenizer(pairs: Pairs, config, *, sources_only: bool = False) -> Tokenizer | None:
    """The tokenizer that was trained before on these pairs as `config.data` says; None if there is none."""
    key = _key(pairs, config, sources_only)
    for file in _folder(config).glob(f"{key}.*.json"):
        try:
            if file.name != _name(key, file.read_bytes()):
                raise UserError("it has changed since it was made")
            return Tokenizer.load(file)
        except (OSError, UserError) as error:
            logger.warning("the tokenizer in %s is damaged (%s) and is made anew", file, error)
            file.unlink(missing_ok=True)
    return None


def keep_tokenizer(tokenizer: Tokenizer, pairs: Pairs, config, *, sources_only: bool = False) -> None:
    """Makes it what `find_tokenizer` finds.

    Raises:
      UserError: the cache cannot be written.
    """
    content = tokenizer.to_json().encode()
    file = _folder(config) / _name(_key(pairs, config, sources_only), content)
    partial = file.with_name(f".{file.name}.partial.{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(file)
    except OSError as error:
        raise UserError(
            f"the tokenizer needs {len(content) / 1e6:,.1f} MB in {file.parent}, which cannot be written "
            f"({error.strerror}); make room there, or name another place with --config.data.cache_dir"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # it is in its place, or was never there
            partial.unlink()


def _folder(config) -> pathlib.Path:
    return cache_root(config.cache_dir) / "tokenizers"


def _key(pairs: Pairs, config, sources_only: bool) -> str:
    settings = [config.tokenizer, config.vocab_size, config.tokenizer_sample, config.seed]
    sides = ["sources"] if sources_only else []
    known = json.dumps([TRAINING, tokenizers.__version__, pairs.fingerprint, *settings, *sides])
    return hashlib.sha256(known.encode()).hexdigest()[:32]


def _name(key: str, content: bytes) -> str:
    """What a file of this content is called, which tells whether it is whole."""
    return f"{key}.{zlib.crc32(content):08x}.json"

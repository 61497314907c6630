"""A split as token ids: tokenised once, then memory-mapped from the cache. Selects the pairs to train on."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from transformer_flax.data.classes import Classes
from transformer_flax.data.sentence_pairs import Pairs, iterate_pairs
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.files import cache_error, cache_root, read_json, whole_folder
from transformer_flax.prefetch import prefetch
from transformer_flax.special_tokens import END_ID

FORMAT_VERSION = "3"  # increase when the content of cache entries changes
THREADS = 3  # chunks that are encoded at the same time
CHECKSUMS = "checksums.json"
BLOCK_PAIRS = 1 << 18  # pairs processed by NumPy at a time, so that temporary arrays stay small

Vocabulary = Tokenizer | Classes  # encodes one side of the pairs

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Sentences in one flat array. Sentence i is ids[offsets[i]:offsets[i+1]] and ends with the end symbol."""

    ids: np.ndarray  # uint16, or int32 for a large vocabulary [all tokens]
    offsets: np.ndarray  # int64 [sentences + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sentence, the end symbol included: int32 [sentences]."""
        return np.subtract(self.offsets[1:], self.offsets[:-1], out=np.empty(len(self), np.int32), casting="same_kind")

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns the number of tokens of each of these sentences, the end symbol included: int64 [len(indices)]."""
        return self.offsets[indices + 1] - self.offsets[indices]

    def tokens(self, indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the first `lengths` tokens of each of these sentences, concatenated: [sum of lengths]."""
        return self.ids[ranges(self.offsets[indices], lengths)]

    def take(self, indices: np.ndarray) -> "Sentences":
        """Returns only these sentences, in this order."""
        lengths = self.lengths_of(indices)
        return Sentences(self.tokens(indices, lengths), np.concatenate([[0], np.cumsum(lengths)]))


def blocks(count: int) -> Iterator[slice]:
    """Returns slices of at most BLOCK_PAIRS indices that cover 0 .. count - 1."""
    return (slice(start, min(start + BLOCK_PAIRS, count)) for start in range(0, count, BLOCK_PAIRS))


def count(values: np.ndarray, size: int) -> np.ndarray:
    """Counts the occurrences of each of 0 .. size - 1: int64 [size]."""
    histogram = np.zeros(size, np.int64)
    for block in blocks(len(values)):
        histogram += np.bincount(values[block], minlength=size)
    return histogram


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns start, start + 1 .. start + length - 1 for each start, concatenated: int64 [sum of lengths]."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenised split."""

    source: Sentences
    target: Sentences

    def __len__(self) -> int:
        return len(self.source)


def load_corpus(
    pairs: Pairs,
    tokenizer: Vocabulary,
    cache_dir: str,
    *,
    labels: Vocabulary | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Corpus:
    """Tokenises pairs, or opens the cache entry that an earlier call wrote.

    `cache_dir` is `config.data.cache_dir`; "" is the user's cache directory. If the targets are labels, `labels`
    encodes them instead of the tokenizer. `progress` is called with (pairs done, all pairs) while tokenising.
    """
    vocabularies = {"source": tokenizer, "target": labels or tokenizer}
    known = [FORMAT_VERSION, pairs.fingerprint, tokenizer.to_json(), *([labels.to_json()] if labels else [])]
    key = hashlib.sha256("\n".join(known).encode()).hexdigest()[:32]
    folder = cache_root(cache_dir) / "corpora" / key
    if folder.is_dir():
        try:
            return _open(folder, vocabularies)
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            logger.warning("the tokenised text in %s is damaged (%s) and is made anew", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    done = written = 0
    try:
        with whole_folder(folder) as partial:
            for done in _tokenize(pairs, vocabularies, partial):
                written = sum(file.stat().st_size for file in partial.iterdir())
                progress(done, len(pairs))
    except OSError as error:
        needed = f"about {written / done * len(pairs) / 1e6:,.1f} MB" if done else "room"
        raise cache_error("the tokenised text", needed, folder.parent, error) from error
    return _open(folder, vocabularies)


def _dtypes(vocabularies: Mapping[str, Vocabulary]) -> dict[str, np.dtype]:
    """Returns the type of each array of a cache entry, by the name of its file."""
    dtypes = {}
    for side, vocabulary in vocabularies.items():
        dtypes[f"{side}.ids"] = np.dtype(np.uint16 if vocabulary.vocab_size <= 1 << 16 else np.int32)
        dtypes[f"{side}.offsets"] = np.dtype(np.int64)
    return dtypes


def _tokenize(pairs: Pairs, vocabularies: Mapping[str, Vocabulary], folder: pathlib.Path) -> Iterator[int]:
    """Writes a cache entry and yields the number of pairs done after each chunk."""
    dtypes = _dtypes(vocabularies)
    checksums = dict.fromkeys(dtypes, 0)

    def encode(chunk: Sequence[tuple[str, str]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        texts = zip(vocabularies.items(), zip(*chunk, strict=True), strict=True)
        return {side: vocabulary.encode_flat(lines) for (side, vocabulary), lines in texts}

    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in dtypes}

        def append(name: str, values: np.ndarray) -> None:
            part = values.astype(dtypes[name], copy=False).data
            files[name].write(part)
            checksums[name] = zlib.crc32(part, checksums[name])

        totals = dict.fromkeys(vocabularies, 0)
        for side in vocabularies:
            append(f"{side}.offsets", np.zeros(1))
        chunks, done = iterate_pairs(pairs), 0
        for encoded in prefetch(encode, chunks, threads=THREADS):
            for side, (tokens, lengths) in encoded.items():
                ends = np.cumsum(lengths)
                append(f"{side}.offsets", ends + np.arange(1, len(ends) + 1) + totals[side])
                append(f"{side}.ids", np.insert(tokens, ends, END_ID))
                totals[side] += len(tokens) + len(ends)
            done += len(lengths)
            yield done
    (folder / CHECKSUMS).write_text(json.dumps(checksums))


def _open(folder: pathlib.Path, vocabularies: Mapping[str, Vocabulary]) -> Corpus:
    """Memory-maps a cache entry. A damaged one raises a FileNotFoundError, ValueError, KeyError or TypeError."""
    checksums, arrays = read_json(folder / CHECKSUMS), {}
    for name, dtype in _dtypes(vocabularies).items():
        file = folder / name
        arrays[name] = np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)
        if zlib.crc32(arrays[name].data) != checksums[name]:
            raise ValueError(f"{name} has changed")
    return Corpus(*(Sentences(arrays[f"{side}.ids"], arrays[f"{side}.offsets"]) for side in ("source", "target")))


@dataclasses.dataclass(frozen=True)
class Selection:
    """The pairs of a split that are used, in the order of the split."""

    indices: np.ndarray  # int32 [pairs used]
    dropped: dict[str, int]  # dropped pairs for each reason; a pair counts for the first reason that applies


def select_training_pairs(corpus: Corpus, config) -> Selection:
    """Drops pairs with an empty side, a long side or unlikely lengths, and duplicates on request.

    `max_length`, `max_length_ratio` and `drop_duplicates` of `config.data` specify which pairs to drop.
    """
    max_length, max_length_ratio = config.max_length, config.max_length_ratio
    duplicate = _is_duplicate(corpus) if config.drop_duplicates else None
    dropped: collections.Counter[str] = collections.Counter()
    kept = []
    for block in blocks(len(corpus)):
        indices = np.arange(block.start, block.stop, dtype=np.int32)
        source, target = corpus.source.lengths_of(indices), corpus.target.lengths_of(indices)
        shorter, longer = np.minimum(source, target), np.maximum(source, target)
        reasons = {"an empty side": shorter == 1, f"more than {max_length} tokens": longer > max_length}
        if max_length_ratio:
            reasons[f"one side over {max_length_ratio:g} times as long"] = longer > max_length_ratio * shorter
        if duplicate is not None:
            reasons["an identical earlier pair"] = duplicate[block]
        left = np.ones(len(indices), bool)
        for reason, holds in reasons.items():
            dropped[reason] += int(np.sum(left & holds))
            left &= ~holds
        kept.append(indices[left])
    return Selection(np.concatenate([np.empty(0, np.int32), *kept]), dict(dropped))


def _is_duplicate(corpus: Corpus) -> np.ndarray:
    """Returns True for each pair that also occurs earlier in the corpus: bool [pairs]."""
    digests = np.empty(len(corpus), np.int64)  # 64 bits: among a few billion pairs, two may collide
    for i in range(len(corpus)):
        pair = corpus.source[i].tobytes() + corpus.target[i].tobytes()  # unambiguous: a side ends at its one end symbol
        digests[i] = int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest(), "little", signed=True)
    duplicate = np.ones(len(corpus), bool)
    duplicate[np.unique(digests, return_index=True)[1]] = False
    return duplicate

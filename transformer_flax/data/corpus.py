"""A split as token ids: tokenised once, then memory-mapped from the cache."""

import dataclasses
import hashlib
import json
import logging
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from transformer_flax.data.classes import Classes
from transformer_flax.data.sources import Pairs, iterate_pairs
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.files import cache_error, cache_root, read_json, whole_folder
from transformer_flax.prefetch import prefetch
from transformer_flax.special_tokens import END_ID

FORMAT = "2"  # increase when the content of cache entries changes
CHUNK = 2048  # pairs encoded at a time
THREADS = 3  # chunks that are encoded at the same time
CHECKSUMS = "checksums.json"
BLOCK = 1 << 18  # pairs processed by NumPy at a time, so that temporary arrays stay small

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
    """Returns slices of at most BLOCK indices that cover 0 .. count - 1."""
    return (slice(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))


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

    Args:
      pairs: the pairs of the split.
      tokenizer: encodes both sides.
      cache_dir: `config.data.cache_dir`; empty for the user's cache directory.
      labels: encodes the target side instead of `tokenizer`, if targets are labels.
      progress: called with (pairs done, all pairs) while tokenising.

    Raises:
      UserError: the cache cannot be written, or a label is unknown.
    """
    vocabularies = {"source": tokenizer, "target": labels or tokenizer}
    known = [FORMAT, pairs.fingerprint, tokenizer.to_json(), *([labels.to_json()] if labels else [])]
    key = hashlib.sha256("\n".join(known).encode()).hexdigest()[:32]
    folder = cache_root(cache_dir) / "corpora" / key
    if folder.is_dir():
        try:
            return _open(folder)
        except Exception as error:  # a damaged header makes NumPy raise errors of many types
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
    return _open(folder)


class _Array:
    """Appends parts of an array to a .npy file.

    np.save would need the whole array, and it does not report a disk that is too full for the last bytes.
    """

    def __init__(self, file: pathlib.Path, dtype: Any):
        self.dtype, self.length = np.dtype(dtype), 0
        self._file, self._checksum = file.open("wb"), 0
        self._write_header()

    def append(self, part: np.ndarray) -> None:
        self._file.write(part.data)
        self.length += len(part)
        self._checksum = zlib.crc32(part.data, self._checksum)

    def close(self) -> int:
        """Completes the file and returns the checksum of the array."""
        self._file.seek(0)  # the header has room for any array length
        self._write_header()
        self._file.close()
        return self._checksum

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


def _tokenize(pairs: Pairs, vocabularies: Mapping[str, Vocabulary], folder: pathlib.Path) -> Iterator[int]:
    """Writes a cache entry and yields the number of pairs done after each chunk."""
    arrays = {}
    for side, vocabulary in vocabularies.items():
        dtype = np.uint16 if vocabulary.vocab_size <= 1 << 16 else np.int32
        arrays[f"{side}.ids"] = _Array(folder / f"{side}.ids.npy", dtype)
        arrays[f"{side}.offsets"] = _Array(folder / f"{side}.offsets.npy", np.int64)
        arrays[f"{side}.offsets"].append(np.zeros(1, np.int64))

    def encode(chunk: Sequence[tuple[str, str]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        texts = zip(vocabularies.items(), zip(*chunk, strict=True), strict=True)
        return {side: vocabulary.encode_flat(lines) for (side, vocabulary), lines in texts}

    chunks, done = iterate_pairs(pairs, range(len(pairs)), CHUNK), 0
    for encoded in prefetch(encode, chunks, ahead=THREADS, threads=THREADS):
        for side, (tokens, lengths) in encoded.items():
            ids, ends = arrays[f"{side}.ids"], np.cumsum(lengths)
            arrays[f"{side}.offsets"].append(ends + np.arange(1, len(ends) + 1) + ids.length)
            ids.append(np.insert(tokens.astype(ids.dtype), ends, END_ID))
        done += len(lengths)
        yield done
    checksums = {name: array.close() for name, array in sorted(arrays.items())}
    (folder / CHECKSUMS).write_text(json.dumps(checksums))


def _open(folder: pathlib.Path) -> Corpus:
    """Memory-maps a cache entry.

    Raises:
      Exception: the cache entry is damaged.
    """
    checksums = read_json(folder / CHECKSUMS)

    def load(name: str) -> np.ndarray:
        array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        if zlib.crc32(array.data) != checksums[name]:
            raise ValueError(f"{name}.npy has changed")
        return array

    return Corpus(**{side: Sentences(load(f"{side}.ids"), load(f"{side}.offsets")) for side in ("source", "target")})

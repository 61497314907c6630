"""A split, tokenised once and memory-mapped from then on."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from transformer_flax.data.sources import Pairs, read_pairs
from transformer_flax.errors import UserError
from transformer_flax.files import cache_root, read_json, require_plain
from transformer_flax.special_tokens import END_ID

FORMAT = "2"  # raise it when what the cache holds changes
CHUNK = 2048  # pairs encoded at a time
AHEAD = 3  # times as many are on their way
CHECKSUMS = "checksums.json"
FORGOTTEN_SECONDS = 24 * 3600  # without a file added to it: nobody is writing that any more
BLOCK = 1 << 18  # pairs looked at at a time

logger = logging.getLogger(__name__)


class Vocabulary(Protocol):
    """What a side is tokenised with: a Tokenizer, or the Classes that labels name."""

    vocab_size: int

    def to_json(self) -> str: ...

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Sentences as one flat array of ids, each closed by the end symbol: sentence i is ids[offsets[i]:offsets[i+1]]."""

    ids: np.ndarray  # uint16, or int32 for a large vocabulary [all tokens]
    offsets: np.ndarray  # int64 [sentences + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of a sentence, the end symbol included."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sentence, the end symbol included: int32 [sentences]."""
        return np.subtract(self.offsets[1:], self.offsets[:-1], out=np.empty(len(self), np.int32), casting="same_kind")

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """The same of some sentences: int64 [len(indices)]."""
        return self.offsets[indices + 1] - self.offsets[indices]

    def tokens(self, indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The first `lengths` tokens of each of these sentences, one after the other: [sum of lengths]."""
        return self.ids[ranges(self.offsets[indices], lengths)]

    def take(self, indices: np.ndarray) -> "Sentences":
        """These sentences alone, in this order."""
        lengths = self.lengths_of(indices)
        return Sentences(self.tokens(indices, lengths), np.concatenate([[0], np.cumsum(lengths)]))


def blocks(count: int) -> Iterator[slice]:
    """0 .. count - 1 in parts, so that what is computed on the way needs little memory however many there are."""
    return (slice(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))


def count(values: np.ndarray, size: int) -> np.ndarray:
    """How often each of 0 .. size - 1 is there: int64 [size]."""
    histogram = np.zeros(size, np.int64)
    for block in blocks(len(values)):
        histogram += np.bincount(values[block], minlength=size)
    return histogram


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each start, `length` numbers of it: int64 [sum of lengths]."""
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
    """The pairs tokenised, from the cache if they are there; a new cache entry appears whole or not at all.

    Args:
      pairs: the split.
      tokenizer: whose ids are wanted.
      labels: whose ids are wanted of the target side, where targets are labels.
      cache_dir: where caches lie; empty for the usual place.
      progress: called with (pairs done, of all pairs) while tokenising.
    """
    vocabularies = {"source": tokenizer, "target": labels or tokenizer}
    known = [FORMAT, pairs.fingerprint, tokenizer.to_json(), *([labels.to_json()] if labels else [])]
    key = hashlib.sha256("\n".join(known).encode()).hexdigest()[:32]
    folder = cache_root(cache_dir) / "corpora" / key
    if folder.is_dir():
        try:
            return _open(folder, len(pairs), vocabularies)
        except Exception as error:  # what a damaged header can do to NumPy is of many kinds
            logger.warning("the tokenised text in %s is damaged (%s) and is made anew", folder, error)
            _remove(folder)
    for forgotten in folder.parent.glob(f"{key}.partial.*"):  # by a process that was killed
        with contextlib.suppress(OSError):  # it is whole now, and elsewhere
            if time.time() - forgotten.stat().st_mtime > FORGOTTEN_SECONDS:
                shutil.rmtree(forgotten)
    partial = folder.with_name(f"{key}.partial.{uuid.uuid4().hex}")
    done = 0

    def counted(count: int, of: int) -> None:
        nonlocal done
        done = count
        progress(count, of)

    try:
        partial.mkdir(parents=True)
        _tokenize(pairs, vocabularies, partial, counted)
        try:
            partial.rename(folder)
        except OSError:  # another process was first: its entry is the same
            if not folder.is_dir():
                raise
    except OSError as error:
        written = sum(file.stat().st_size for file in partial.glob("*"))
        needed = f"about {written / done * len(pairs) / 1e6:,.1f} MB" if done else "room"
        raise UserError(
            f"the tokenised text needs {needed} in {folder.parent}, which cannot be written ({error}); "
            "make room there, or name another place with --config.data.cache_dir"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        return _open(folder, len(pairs), vocabularies)
    except Exception as error:
        raise UserError(
            f"the tokenised text in {folder} is damaged ({error}) and could not be replaced; remove it, or name "
            "another place with --config.data.cache_dir"
        ) from error


class _Array:
    """An array on its way to the disk, part by part."""

    # Not np.save, which wants it whole, and overlooks that the last bytes could not be written: a full disk, a quota.

    def __init__(self, file: pathlib.Path, dtype: Any):
        self._file, self._dtype = file.open("wb"), np.dtype(dtype)
        self._length, self._checksum = 0, 0
        self._write_header()

    def append(self, part: np.ndarray) -> None:
        self._file.write(part.data)
        self._length += len(part)
        self._checksum = zlib.crc32(part.data, self._checksum)

    def close(self) -> int:
        """Completes the file, and returns its checksum."""
        self._file.seek(0)  # the header has room for any length
        self._write_header()
        self._file.close()
        return self._checksum

    def _write_header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


class _Side:
    """One language on its way to the disk: `<name>.ids.npy` and `<name>.offsets.npy`."""

    def __init__(self, folder: pathlib.Path, name: str, dtype: Any):
        self._name, self._dtype, self._tokens = name, dtype, 0
        self._ids = _Array(folder / f"{name}.ids.npy", dtype)
        self._offsets = _Array(folder / f"{name}.offsets.npy", np.int64)
        self._offsets.append(np.zeros(1, np.int64))

    def append(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        ends = np.cumsum(lengths)
        self._ids.append(np.insert(ids.astype(self._dtype), ends, END_ID))
        ends += np.arange(1, len(lengths) + 1) + self._tokens
        self._offsets.append(ends)
        self._tokens += len(ids) + len(lengths)

    def close(self) -> dict[str, int]:
        """Completes the files, and returns the checksum of each."""
        return {f"{self._name}.ids": self._ids.close(), f"{self._name}.offsets": self._offsets.close()}


def _tokenize(
    pairs: Pairs, vocabularies: Mapping[str, Vocabulary], folder: pathlib.Path, progress: Callable[[int, int], None]
) -> None:
    """Writes the entry. While all cores encode some pairs, those before are written and those behind are read."""
    sides = [_Side(folder, name, _dtype(vocabulary)) for name, vocabulary in vocabularies.items()]
    ahead: collections.deque[list[concurrent.futures.Future]] = collections.deque()
    done = 0

    def write() -> None:
        nonlocal done
        for side, encoded in zip(sides, ahead.popleft(), strict=True):
            side.append(*encoded.result())
        done = min(done + CHUNK, len(pairs))
        progress(done, len(pairs))

    with concurrent.futures.ThreadPoolExecutor(AHEAD) as pool:
        for start in range(0, len(pairs), CHUNK):
            texts = zip(*read_pairs(pairs, range(start, min(start + CHUNK, len(pairs)))), strict=True)
            encoders = [vocabulary.encode_flat for vocabulary in vocabularies.values()]
            ahead.append([pool.submit(encode, side) for encode, side in zip(encoders, texts, strict=True)])
            if len(ahead) == AHEAD:
                write()
        while ahead:
            write()
    checksums = sides[0].close() | sides[1].close()
    (folder / CHECKSUMS).write_text(json.dumps(checksums))


def _open(folder: pathlib.Path, pairs: int, vocabularies: Mapping[str, Vocabulary]) -> Corpus:
    """The entry, memory-mapped.

    Raises:
      Exception: it is cut short, or not what was written.
    """
    checksums = read_json(folder / CHECKSUMS)

    def load(name: str, dtype: Any) -> np.ndarray:
        require_plain(folder / f"{name}.npy")
        array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        if array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{name}.npy is {array.dtype} of {array.ndim} axes")
        if zlib.crc32(array.data) != checksums[name]:
            raise ValueError(f"{name}.npy has changed")
        return array

    def load_side(side: str, vocabulary: Vocabulary) -> Sentences:
        ids, offsets = load(f"{side}.ids", _dtype(vocabulary)), load(f"{side}.offsets", np.int64)
        ends = offsets[1:]
        # No checksum vouches for these: whoever wrote the arrays has written theirs too.
        divides = len(ends) == pairs and offsets[0] == 0 and offsets[-1] == len(ids)
        if not (divides and all(np.all(offsets[block] < ends[block]) for block in blocks(pairs))):
            raise ValueError(f"{side}.offsets.npy does not divide the ids into {pairs:,} sentences")
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary.vocab_size:
            raise ValueError(f"{side}.ids.npy has ids beyond the vocabulary")
        if not all(np.all(ids[ends[block] - 1] == END_ID) for block in blocks(pairs)):
            raise ValueError(f"{side}.ids.npy has sentences without an end")
        return Sentences(ids, offsets)

    return Corpus(**{side: load_side(side, vocabulary) for side, vocabulary in vocabularies.items()})


def _dtype(vocabulary: Vocabulary) -> Any:
    return np.dtype(np.uint16 if vocabulary.vocab_size <= 1 << 16 else np.int32)


def _remove(folder: pathlib.Path) -> None:
    """A link itself and not what it leads to, where something else may lie."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)

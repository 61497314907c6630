"""A split, tokenised once and memory-mapped from then on."""

import dataclasses
import hashlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable

import numpy as np

from transformer_flax.data.pairs import Pairs
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID

FORMAT = "1"  # raise it when what the cache holds changes
CHUNK = 4096  # pairs encoded at a time


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Sentences as one flat array of ids, each closed by the end symbol: sentence i is ids[offsets[i]:offsets[i+1]]."""

    ids: np.ndarray  # int32 [all tokens]
    offsets: np.ndarray  # int64 [sentences + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sentence, the end symbol included: int64 [sentences]."""
        return np.diff(self.offsets)

    def padded(self, indices: np.ndarray, rows: int, width: int) -> np.ndarray:
        """The sentences of `indices` as int32 [rows, width], padded with 0; what is longer than `width` is cut."""
        column = np.arange(width)
        length = np.minimum(self.offsets[indices + 1] - self.offsets[indices], width)
        inside = column < length[:, None]
        block = np.zeros((rows, width), np.int32)
        block[: len(indices)][inside] = self.ids[(self.offsets[indices][:, None] + column)[inside]]
        return block


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenised split."""

    source: Sentences
    target: Sentences

    def __len__(self) -> int:
        return len(self.source)


def cache_root(cache_dir: str) -> pathlib.Path:
    """`cache_dir`, or where caches are kept by custom."""
    if cache_dir:
        return pathlib.Path(cache_dir)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "transformer_flax"


def load_corpus(
    pairs: Pairs, tokenizer: Tokenizer, cache_dir: str, *, progress: Callable[[int, int], None] = lambda done, of: None
) -> Corpus:
    """The pairs tokenised, from the cache if they are there; a new cache entry appears whole or not at all.

    Args:
      pairs: the split.
      tokenizer: whose ids are wanted.
      cache_dir: where caches lie; empty for the usual place.
      progress: called with (pairs done, of all pairs) while tokenising.
    """
    key = hashlib.sha256("\n".join([FORMAT, pairs.fingerprint, tokenizer.to_json()]).encode()).hexdigest()[:32]
    folder = cache_root(cache_dir) / "corpora" / key
    if not folder.is_dir():
        corpus = _tokenize(pairs, tokenizer, progress)
        try:
            _write(corpus, folder)
        except OSError as error:
            megabytes = sum(a.nbytes for side in corpus.values() for a in (side.ids, side.offsets)) / 1e6
            raise UserError(
                f"the tokenised text needs {megabytes:.1f} MB in {folder.parent}, which cannot be written ({error}); "
                "make room there, or name another place with --config.data.cache_dir"
            ) from error
    return Corpus(*(_map(folder, side) for side in ("source", "target")))


def _write(corpus: dict[str, Sentences], folder: pathlib.Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial.{uuid.uuid4().hex}")
    try:
        partial.mkdir(parents=True)
        for side, sentences in corpus.items():
            for part, array in (("ids", sentences.ids), ("offsets", sentences.offsets)):
                # Not np.save, which overlooks that the last bytes could not be written: a full disk, a quota.
                with (partial / f"{side}.{part}.npy").open("wb") as file:
                    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
                    file.write(array.data)
        try:
            partial.rename(folder)
        except OSError:  # another process was first: its entry is the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tokenize(pairs: Pairs, tokenizer: Tokenizer, progress: Callable[[int, int], None]) -> dict[str, Sentences]:
    ids: tuple[list, list] = ([], [])
    lengths: tuple[list, list] = ([], [])
    for start in range(0, len(pairs), CHUNK):
        stop = min(start + CHUNK, len(pairs))
        for side, texts in enumerate(zip(*(pairs[i] for i in range(start, stop)), strict=False)):
            for sentence in tokenizer.encode(texts):
                sentence.append(END_ID)
                ids[side].append(np.array(sentence, np.int32))
                lengths[side].append(len(sentence))
        progress(stop, len(pairs))
    return {
        name: Sentences(
            np.concatenate([*ids[side], np.empty(0, np.int32)]), np.cumsum([0, *lengths[side]], dtype=np.int64)
        )
        for side, name in enumerate(("source", "target"))
    }


def _map(folder: pathlib.Path, side: str) -> Sentences:
    return Sentences(
        *(np.load(folder / f"{side}.{part}.npy", mmap_mode="r", allow_pickle=False) for part in ("ids", "offsets"))
    )

"""Trained word vectors: a folder on the disk, and what is near to a word.

A word is a piece of the vocabulary that begins with a blank and that the text has mostly as a whole word. A word of
several pieces has no vector of its own: it is given the mean of theirs, and is no neighbour of any.
"""

import dataclasses
import functools
import hashlib
import io
import json
import pathlib
import shutil
import uuid
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_flax.data.corpus import Sentences, blocks
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.files import checked, read_json, require_plain, signed
from transformer_flax.special_tokens import END_ID

TOKENIZER, DESCRIPTION = "tokenizer.json", "config.json"
ARRAYS = {"vectors": np.dtype(np.float32), "counts": np.dtype(np.int64)}
UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # a part of a letter
MOSTLY = 0.5  # share of a piece's occurrences in which it is a whole word


@dataclasses.dataclass(frozen=True, eq=False)
class Vectors:
    """A vector for each piece of a vocabulary."""

    tokenizer: Tokenizer
    vectors: np.ndarray  # float32 [V, d_model], of mean square length 1
    counts: np.ndarray  # int64 [2, V]: how often each piece stands in the text, and how often as a whole word

    @classmethod
    def make(
        cls, tokenizer: Tokenizer, vectors: np.ndarray, counts: np.ndarray, whole: np.ndarray, rng: np.random.Generator
    ) -> "Vectors":
        """Vectors as a model's embeddings start: of mean square length 1, or an entry's variance 1 / d_model.

        Those of pieces that the text does not have are drawn from a normal distribution of that variance.
        """
        seen = counts > 0
        scaled = rng.normal(scale=vectors.shape[1] ** -0.5, size=vectors.shape)
        scaled[seen] = vectors[seen] / np.sqrt(np.mean(np.sum(vectors[seen] ** 2, axis=1)))
        return cls(tokenizer, scaled.astype(np.float32), np.stack([counts, whole]))

    @functools.cached_property
    def _spellings(self) -> list[str]:
        return spell(self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """Changes with any of the vectors."""
        return hashlib.sha256(self.vectors.tobytes()).hexdigest()

    def vector(self, word: str) -> np.ndarray:
        """The vector of a word or of a few, [d_model]: the mean of its pieces'.

        Raises:
          UserError: there is nothing to look up, or the text had none of its pieces.
        """
        [pieces] = self.tokenizer.encode([word.strip()])
        known = [piece for piece in pieces if self.counts[0, piece]]
        if not known:
            raise UserError(f"there is no vector of {word!r}: the text that these vectors are of had no piece of it")
        return self.vectors[known].mean(axis=0)

    def words(self, least: int = 1) -> list[tuple[str, int]]:
        """The words that stand in the text at least so often, with the ids of their pieces; the most frequent first."""
        pieces, whole = self.counts
        chosen = np.flatnonzero((whole >= max(least, 1)) & (whole > MOSTLY * pieces))
        chosen = chosen[np.argsort(-whole[chosen], kind="stable")]
        return [(self._spellings[piece].strip(), int(piece)) for piece in chosen]

    def nearest(self, word: str, count: int = 10, *, least: int = 5) -> list[tuple[str, float]]:
        """The words whose vectors have the greatest cosine with a word's, and the cosines.

        Args:
          word: one or a few, in their usual spelling: "Dog" is not "dog".
          count: how many.
          least: how often a neighbour stands in the text.

        Raises:
          UserError: as `vector`, or there are no words so frequent.
        """
        others = [(name, piece) for name, piece in self.words(least) if name != word.strip()]
        if not others:
            raise UserError(f"no word stands in the text {least:,} times or more")
        wanted = self.vector(word)
        table = self.vectors[[piece for _, piece in others]]
        cosines = table @ wanted / (np.linalg.norm(table, axis=1) * np.linalg.norm(wanted))
        return [(others[i][0], float(cosines[i])) for i in np.argsort(-cosines, kind="stable")[:count]]

    def save(self, folder: pathlib.Path, config: dict[str, Any]) -> None:
        """Writes them, whole or not at all.

        Args:
          folder: that is not there yet.
          config: of the training, to be told.

        Raises:
          UserError: it is there.
          OSError: it cannot be written.
        """
        require_free(folder)
        partial = folder.with_name(f".{folder.name}.partial.{uuid.uuid4().hex}")
        partial.mkdir(parents=True)
        try:
            contents = {TOKENIZER: self.tokenizer.to_json().encode()}
            for name in ARRAYS:
                stream = io.BytesIO()  # np.save to a file overlooks that its last bytes could not be written
                np.save(stream, getattr(self, name), allow_pickle=False)
                contents[f"{name}.npy"] = stream.getvalue()
            for name, content in contents.items():
                (partial / name).write_bytes(content)
            checksums = {name: zlib.crc32(content) for name, content in contents.items()}
            description = signed({"config": config, "checksums": checksums})
            (partial / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", "utf-8")
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @classmethod
    def load(cls, folder: pathlib.Path) -> "Vectors":
        """What `save` has written; nothing in the folder is unpickled.

        Raises:
          UserError: there is no such folder, or what it holds is damaged or something else.
        """
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder} of word vectors")
        if not (folder / DESCRIPTION).exists():
            raise UserError(f"{folder} holds no word vectors: it has no {DESCRIPTION}")
        try:
            checksums = checked(read_json(folder / DESCRIPTION))["checksums"]
            for name in (TOKENIZER, *(f"{name}.npy" for name in ARRAYS)):
                require_plain(folder / name)
                if zlib.crc32((folder / name).read_bytes()) != checksums[name]:
                    raise ValueError(f"{name} has changed")
            tokenizer = Tokenizer.load(folder / TOKENIZER)
            found = cls(tokenizer, **{name: _load(folder / f"{name}.npy", dtype) for name, dtype in ARRAYS.items()})
            rows = tokenizer.vocab_size
            if len(found.vectors) != rows or found.counts.shape != (2, rows) or not np.isfinite(found.vectors).all():
                raise ValueError(f"they are not {rows:,} vectors of numbers, as its tokenizer has pieces")
        except Exception as error:  # what a damaged header can do to NumPy is of many kinds
            raise UserError(f"{folder} cannot be read as word vectors ({error}); train them again") from error
        return found


def require_free(folder: pathlib.Path) -> None:
    """Raises:
    UserError: there is something at that place already.
    """
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already; name another folder for the vectors")


def spell(tokenizer: Tokenizer) -> list[str]:
    """Each piece as it stands behind another word: with a blank if it begins one. Bytes alone are U+FFFD."""
    [anchor] = tokenizer.encode(["a"])
    before = tokenizer.decode(anchor)
    return [tokenizer.decode([*anchor, piece]).removeprefix(before) for piece in range(tokenizer.vocab_size)]


def count_whole_words(sides: Sequence[Sentences], tokenizer: Tokenizer) -> np.ndarray:
    """How often each piece is a whole word of a text: it begins one, and what comes next does not go on with it."""
    spellings = spell(tokenizer)
    is_word = np.array([text.lstrip()[:1].isalnum() or text.lstrip().startswith(UNREADABLE) for text in spellings])
    begins = is_word & np.array([text[:1].isspace() for text in spellings])
    goes_on = is_word & ~begins
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for side in sides:
        for block in blocks(len(side.ids)):
            ids = np.asarray(side.ids[block])
            behind = np.append(side.ids[block.start + 1 : block.stop + 1], END_ID)[: len(ids)]
            counts += np.bincount(ids[begins[ids] & ~goes_on[behind]], minlength=len(counts))
    return counts


def _load(file: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    """A two-dimensional array, memory-mapped.

    Raises:
      Exception: it is none, or another.
    """
    require_plain(file)
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if array.dtype != dtype or array.ndim != 2:
        raise ValueError(f"{file.name} is {array.dtype} of {array.ndim} axes")
    return array

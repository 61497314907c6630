"""Trained word vectors: their folder on disk, and the neighbours of a word.

A piece of the vocabulary counts as a word if it begins with a blank and is a whole word in most of its occurrences. The
vector of a word of several pieces is the mean of the vectors of those pieces that occur in the text. Such a word is
never listed as a neighbour.
"""

import dataclasses
import functools
import hashlib
import io
import json
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_flax.data.corpus import Sentences, blocks
from transformer_flax.data.normalisation import Normaliser
from transformer_flax.data.tokenizer import UNKNOWN, Tokenizer, starts_with_letter
from transformer_flax.errors import UserError
from transformer_flax.files import read_json, require_free, verify_checksum, whole_folder, with_checksum
from transformer_flax.special_tokens import END_ID

TOKENIZER, DESCRIPTION = "tokenizer.json", "config.json"
ARRAYS = ("vectors", "counts")
UNREADABLE = "\N{REPLACEMENT CHARACTER}"  # stands for a part of a character
MOSTLY = 0.5  # share of a piece's occurrences in which it is a whole word


@dataclasses.dataclass(frozen=True, eq=False)
class Vectors:
    """A vector for each piece of a vocabulary."""

    tokenizer: Tokenizer
    vectors: np.ndarray  # float32 [V, d_model], of mean square length 1
    counts: np.ndarray  # int64 [2, V]: occurrences of each piece in the text, and its occurrences as a whole word
    lowercase: bool = False  # the text is in lower case, and so are words looked up; set by `load`

    @classmethod
    def make(
        cls, tokenizer: Tokenizer, vectors: np.ndarray, counts: np.ndarray, whole: np.ndarray, rng: np.random.Generator
    ) -> "Vectors":
        """Scales vectors to the size of a model's initial embeddings: mean square length 1, a variance of 1 / d_model.

        Pieces that do not occur in the text get random vectors of that variance.
        """
        seen = counts > 0
        scaled = rng.normal(scale=vectors.shape[1] ** -0.5, size=vectors.shape)
        scaled[seen] = vectors[seen] / np.sqrt(np.mean(np.sum(vectors[seen] ** 2, axis=1)))
        return cls(tokenizer, scaled.astype(np.float32), np.stack([counts, whole]))

    @functools.cached_property
    def _piece_texts(self) -> list[str]:
        return piece_texts(self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """A hash of all vectors."""
        return hashlib.sha256(self.vectors.tobytes()).hexdigest()

    def vector(self, word: str) -> np.ndarray:
        """Returns the vector of one or several words, [d_model]: the mean over those pieces that occur in the text.

        The blank before a word is no piece of it.

        Raises:
          UserError: the word is empty, or none of its pieces occurs in the text.
        """
        [pieces] = self.tokenizer.encode([self._spelt(word)])
        own = [piece for piece in pieces if self._piece_texts[piece].strip() not in ("", UNKNOWN)]
        known = [piece for piece in own if self.counts[0, piece]]
        if not known:
            raise UserError(f"there is no vector of {word!r}: the training text had no piece of it")
        return self.vectors[known].mean(axis=0)

    def _spelt(self, word: str) -> str:
        return Normaliser("", self.lowercase)(word.strip())

    def words(self, least: int = 1) -> list[tuple[str, int]]:
        """Lists the words that occur at least `least` times, with the ids of their pieces, most frequent first."""
        pieces, whole = self.counts
        chosen = np.flatnonzero((whole >= least) & (whole > MOSTLY * pieces))
        chosen = chosen[np.argsort(-whole[chosen], kind="stable")]
        words = [(self._piece_texts[piece].strip(), int(piece)) for piece in chosen]
        return [(word, piece) for word, piece in words if word != UNKNOWN]

    def nearest(self, word: str, count: int = 10, *, least: int = 5) -> list[tuple[str, float]]:
        """Returns the neighbours of a word, which are the words with the greatest cosine, and their cosines.

        Args:
          word: one or several words, as they are spelt in the text: "Dog" is not "dog", unless `lowercase`.
          least: the number of occurrences that a neighbour must have.

        Raises:
          UserError: as in `vector`; or no other word occurs `least` times.
        """
        others = [(name, piece) for name, piece in self.words(least) if name != self._spelt(word)]
        if not others:
            raise UserError(f"no word stands in the text {least:,} times or more")
        wanted = self.vector(word)
        table = self.vectors[[piece for _, piece in others]]
        cosines = table @ wanted / (np.linalg.norm(table, axis=1) * np.linalg.norm(wanted))
        return [(others[i][0], float(cosines[i])) for i in np.argsort(-cosines, kind="stable")[:count]]

    def save(self, folder: pathlib.Path, config: dict[str, Any]) -> None:
        """Writes a new folder, completely or not at all. `load` reads `data.lowercase` of the training's config."""
        require_free(folder)
        with whole_folder(folder) as partial:
            contents = {TOKENIZER: self.tokenizer.to_json().encode()}
            for name in ARRAYS:
                stream = io.BytesIO()  # np.save to a file does not notice that its last bytes could not be written
                np.save(stream, getattr(self, name), allow_pickle=False)
                contents[f"{name}.npy"] = stream.getvalue()
            for name, content in contents.items():
                (partial / name).write_bytes(content)
            checksums = {name: zlib.crc32(content) for name, content in contents.items()}
            description = with_checksum({"config": config, "checksums": checksums})
            (partial / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: pathlib.Path) -> "Vectors":
        """Reads a folder that `save` wrote. Nothing is unpickled.

        Raises:
          UserError: the folder does not exist, holds something else, or is damaged.
        """
        if not (file := folder / f"{ARRAYS[0]}.npy").exists():
            raise UserError(f"{folder} holds no word vectors: there is no {file}")
        try:
            description = verify_checksum(read_json(folder / DESCRIPTION))
            checksums, config = description["checksums"], description["config"]
            contents = {name: (folder / name).read_bytes() for name in (TOKENIZER, *(f"{name}.npy" for name in ARRAYS))}
            for name, content in contents.items():
                if zlib.crc32(content) != checksums[name]:
                    raise ValueError(f"{name} has changed")
            tokenizer = Tokenizer.load(folder / TOKENIZER)
            arrays = {name: np.load(io.BytesIO(contents[f"{name}.npy"]), allow_pickle=False) for name in ARRAYS}
        except Exception as error:  # damaged headers make NumPy raise errors of many types
            raise UserError(f"{folder} cannot be read as word vectors ({error}); train them again") from error
        return cls(tokenizer, **arrays, lowercase=config.get("data", {}).get("lowercase", False))


def piece_texts(tokenizer: Tokenizer) -> list[str]:
    """Returns the text of each piece after another word; it begins with a blank if the piece begins a word.

    Incomplete characters are U+FFFD.
    """
    [anchor] = tokenizer.encode(["a"])
    before = tokenizer.decode(anchor)
    return [tokenizer.decode([*anchor, piece]).removeprefix(before) for piece in range(tokenizer.vocab_size)]


def count_whole_words(sides: Sequence[Sentences], tokenizer: Tokenizer) -> np.ndarray:
    """Counts how often each piece is a whole word: it begins a word, and the next piece does not continue the word."""
    spellings = piece_texts(tokenizer)
    stripped = [text.lstrip() for text in spellings]
    is_word = np.array([starts_with_letter(text) or text.startswith(UNREADABLE) for text in stripped])
    begins = is_word & np.array([text[:1].isspace() for text in spellings])
    continues = is_word & ~begins
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for side in sides:
        for block in blocks(len(side.ids)):
            ids = np.asarray(side.ids[block])
            behind = np.append(side.ids[block.start + 1 : block.stop + 1], END_ID)[: len(ids)]
            counts += np.bincount(ids[begins[ids] & ~continues[behind]], minlength=len(counts))
    return counts

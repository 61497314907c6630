"""Where text comes from: random-access sequences of (source, target) sentences, one for each split."""

import hashlib
import pathlib
from collections.abc import Sequence
from typing import Protocol

from transformer_flax.data.numbers import NumberPairs
from transformer_flax.data.text import OPENERS, read_side_by_side
from transformer_flax.data.tfds import TfdsPairs
from transformer_flax.errors import UserError

SPLITS = ("train", "valid", "test")


class Pairs(Protocol):
    """Sentence pairs, and a fingerprint that changes whenever one of them does."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[str, str]: ...


def read_pairs(pairs: Pairs, indices: Sequence[int]) -> list[tuple[str, str]]:
    """The pairs at `indices`, in bulk where they have `__getitems__`: it may be far faster than one by one."""
    in_bulk = getattr(pairs, "__getitems__", None)
    return in_bulk(indices) if in_bulk else [pairs[i] for i in indices]


def load_pairs(config, split: str) -> Pairs:
    """The pairs of a split of `config.data`.

    Raises:
      UserError: there is no such source, folder, set, file or language, or a file is not what it should be.
    """
    if split not in SPLITS:
        raise UserError(f"there is no split {split!r}; the splits are {', '.join(SPLITS)}")
    if config.source == "numbers":
        return NumberPairs(config, split)
    if config.source == "folder":
        return FolderPairs(config, split)
    if config.source == "tfds":
        return TfdsPairs(config, split)
    raise UserError(f"config.data.source is {config.source!r}; it must be numbers, folder or tfds")


class FolderPairs:
    """Text files `<split>.<language>`, plain, .gz or .xz, UTF-8, one sentence a line, side by side."""

    def __init__(self, config, split: str):
        folder = pathlib.Path(config.path)
        if not config.path:
            raise UserError("config.data.path is empty: name the folder of texts with --config.data.path=FOLDER")
        if not folder.is_dir():
            raise UserError(f"config.data.path is {config.path!r}: there is no such folder")
        files = [_find(folder, split, language) for language in (config.source_language, config.target_language)]
        self.sources, self.targets = read_side_by_side(*files)
        digest = hashlib.sha256()
        for lines in (self.sources, self.targets):
            for line in lines:
                digest.update(line.encode() + b"\n")
            digest.update(b"\0")
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> tuple[str, str]:
        return self.sources[index], self.targets[index]


def _find(folder: pathlib.Path, split: str, language: str) -> pathlib.Path:
    for suffix in OPENERS:
        file = folder / f"{split}.{language}{suffix}"
        if file.is_file():
            return file
    present = ", ".join(sorted(file.name for file in folder.iterdir())[:20]) or "nothing"
    raise UserError(f"{folder} has no {split}.{language} (nor .gz or .xz); it holds {present}")

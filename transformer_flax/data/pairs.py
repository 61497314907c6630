"""Where text comes from: random-access sequences of (source, target) sentences, one for each split."""

import codecs
import gzip
import hashlib
import lzma
import pathlib
import zlib
from typing import Protocol

from transformer_flax.data.numbers import NumberPairs
from transformer_flax.data.tfds import TfdsPairs
from transformer_flax.errors import UserError

SPLITS = ("train", "valid", "test")
OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}
DAMAGES = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)  # of a compressed file


class Pairs(Protocol):
    """Sentence pairs, and a fingerprint that changes whenever one of them does."""

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[str, str]: ...


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
        self.sources, self.targets = (read_lines(file) for file in files)
        if len(self.sources) != len(self.targets):
            raise UserError(
                f"{files[0]} has {len(self.sources):,} lines and {files[1]} has {len(self.targets):,}: "
                "line N of one must translate line N of the other"
            )
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


def plain_line(raw: bytes, *, first: bool) -> bytes:
    """A line without its end and, where it is the first of a file, without the mark that some editors put there."""
    return (raw.removeprefix(codecs.BOM_UTF8) if first else raw).rstrip(b"\r\n")


def read_lines(file: pathlib.Path) -> list[str]:
    lines = []
    with OPENERS.get(file.suffix, open)(file, "rb") as stream:
        try:
            for line in stream:
                lines.append(plain_line(line, first=not lines).decode())
        except UnicodeDecodeError as error:
            number = len(lines) + 1
            raise UserError(f"{file}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from error
        except DAMAGES as error:
            raise UserError(f"{file} is damaged after line {len(lines):,}: {error}") from error
    return lines

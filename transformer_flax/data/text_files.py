"""Lines of text files: UTF-8, plain or compressed as .gz or .xz.

Files are decompressed while they are read, and no line takes more than MOST_LINE_BYTES of memory. So a small file that
decompresses to a huge text costs no more than the same text uncompressed.
"""

import array
import codecs
import contextlib
import gzip
import lzma
import mmap
import os
import pathlib
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, BinaryIO

import numpy as np

from transformer_flax.data.sentence_pairs import require_split
from transformer_flax.errors import UserError
from transformer_flax.files import cache_error, write_whole

OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}
DAMAGES = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, MemoryError)  # raised by damaged compressed files
MOST_LINE_BYTES = 1 << 20  # bytes of a line; a file with longer lines does not have one sentence a line
BLOCK_BYTES = 1 << 20  # bytes; a shorter text stays in memory


def open_text(file: pathlib.Path) -> BinaryIO:
    stream: Any = OPENERS.get(file.suffix, open)(file, "rb")
    return stream


def write_pairs(
    folder: str | os.PathLike[str],
    splits: Mapping[str, Iterable[tuple[str, str]]],
    source_language: str = "en",
    target_language: str = "de",
) -> None:
    """Writes sentence pairs as the folder of text files that `config.data.path` names.

    Args:
      folder: created if necessary; existing files of the same names are replaced.
      splits: the (source, target) pairs of each split; see `sentence_pairs.SPLITS`.
      source_language, target_language: the suffixes of the files.

    Raises:
      UserError: there is no such split, an item is not a pair, or a sentence has a line break.
    """
    for split in splits:
        require_split(split)
    if source_language == target_language:
        raise UserError(f"both languages are {source_language!r}, so one file would replace the other")
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    for split, given in splits.items():
        pairs = list(given)
        if wrong := [pair for pair in pairs if isinstance(pair, str) or len(pair) != 2]:
            raise UserError(f"{split} has {wrong[0]!r}, which is not a pair (source, target)")
        for side, language in enumerate((source_language, target_language)):
            file, sentences = pathlib.Path(folder) / f"{split}.{language}", [pair[side] for pair in pairs]
            for sentence in sentences:
                if "\n" in sentence or "\r" in sentence:
                    raise UserError(f"{sentence[:80]!r} has a line break; {file} holds one sentence a line")
            write_whole(file, "".join(f"{sentence}\n" for sentence in sentences))


def text_folder(path: str) -> pathlib.Path:
    """Returns the folder that config.data.path names."""
    if not path:
        raise UserError("config.data.path is empty: name the folder of texts with --config.data.path=FOLDER")
    folder = pathlib.Path(path)
    if not folder.is_dir():
        what = "that is a file" if folder.exists() else "there is no such folder"
        raise UserError(
            f"config.data.path is {path!r}: {what}; name the folder of texts, or make one with "
            "python -m transformer_flax.fetch"
        )
    return folder


def find_text(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """Returns the file `name`, `name`.gz or `name`.xz of a folder, or None if the folder has none of them."""
    files = [folder / f"{name}{suffix}" for suffix in OPENERS]
    return next((file for file in files if file.is_file()), None)


def require_text(folder: pathlib.Path, name: str, *, hint: str = "") -> pathlib.Path:
    """Returns the file that `find_text` finds. Without one, the error lists the folder's files and ends with `hint`."""
    file = find_text(folder, name)
    if file is None:
        present = ", ".join(sorted(file.name for file in folder.iterdir())[:20]) or "nothing"
        raise UserError(f"{folder} has no {name} (nor .gz or .xz); it holds {present}{hint}")
    return file


def decode_lines(stream: BinaryIO, name: str, *, spoilt: list[str] | None = None) -> Iterator[str]:
    """Yields the lines of a file without line ends. Reads each line only when it is needed.

    A byte order mark at the start is skipped, and `name` is the file's name in messages. If a list `spoilt` is given,
    it receives the file and number of each line that is not UTF-8, and invalid bytes become U+FFFD. Otherwise, such a
    line raises an error.
    """
    number = 0
    try:
        for number, raw in enumerate(iter(lambda: stream.readline(MOST_LINE_BYTES), b""), start=1):
            if len(raw) == MOST_LINE_BYTES and not raw.endswith(b"\n"):
                raise UserError(
                    f"{name}, line {number:,}: at least {MOST_LINE_BYTES:,} bytes long; a text has one sentence a line"
                )
            line = (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).rstrip(b"\r\n")
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                place = f"{name}, line {number:,}"
                if spoilt is None:
                    raise UserError(f"{place}: not UTF-8 ({error.reason} at byte {error.start})") from error
                spoilt.append(place)
                yield line.decode(errors="replace")
    except DAMAGES as error:
        raise UserError(f"{name} is damaged after line {number:,}: {error}") from error


def one_line(text: str) -> str:
    """Returns a text as one line: a line break, such as U+2028, becomes a blank, or nothing at the end of the text."""
    return " ".join(text.splitlines())


def read_lines(file: pathlib.Path) -> Iterator[str]:
    """Yields the lines of a file."""
    with open_text(file) as stream:
        yield from decode_lines(stream, str(file))


def read_side_by_side(source: pathlib.Path, target: pathlib.Path) -> tuple[list[str], list[str]]:
    """Reads two files where line N of one file translates line N of the other."""
    sources, targets = (list(read_lines(file)) for file in (source, target))
    require_as_many(source, sources, target, targets)
    return sources, targets


def require_as_many(source: object, sources: Sized, target: object, targets: Sized) -> None:
    """Checks that two texts have the same number of lines. The message names the texts `source` and `target`."""
    if len(sources) != len(targets):
        raise UserError(
            f"{source} has {len(sources):,} lines and {target} has {len(targets):,}: "
            "line N of one must belong to line N of the other"
        )


class Lines:
    """Lines that are read once and then kept in an unnamed temporary file in `folder`, memory-mapped.

    The given lines have no line ends. The kept lines do not change when the file that they were read from changes.
    Memory holds 8 bytes a line. A text shorter than BLOCK_BYTES stays in memory as a whole.
    """

    text: bytes | mmap.mmap  # UTF-8; each line ends with a line feed

    def __init__(self, lines: Iterable[str], folder: pathlib.Path):
        remaining = iter(lines)
        starts = array.array("q", [0])  # grows in place, unlike a NumPy array
        block, file = bytearray(), None
        with contextlib.ExitStack() as stack:

            def write(*, last: bool = False) -> None:
                nonlocal file
                try:
                    if file is None:
                        folder.mkdir(parents=True, exist_ok=True)
                        file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
                    left = bytes(block)
                    while left:  # an unbuffered write may write only a part
                        left = left[file.write(left) :]
                    if last:
                        os.fsync(file.fileno())  # some network file systems report a full disk only now
                except OSError as error:
                    size = starts[-1] + sum(len(line.encode()) + 1 for line in remaining)
                    raise cache_error("a text that is prepared", f"{size / 1e6:,.1f} MB", folder, error) from error
                block.clear()

            for line in remaining:
                raw = line.encode() + b"\n"
                starts.append(starts[-1] + len(raw))
                block += raw
                if len(block) >= BLOCK_BYTES:
                    write()
            if file is None:
                self.text = bytes(block)
            else:
                write(last=True)
                self.text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts = np.frombuffer(starts, np.int64)  # start of each line, then the end of the last line: [lines + 1]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, indices: Sequence[int]) -> list[str]:
        """Returns the lines at `indices`."""
        places = np.asarray(indices, np.int64)
        starts, ends = self._starts[places].tolist(), (self._starts[places + 1] - 1).tolist()
        return [self.text[start:end].decode() for start, end in zip(starts, ends, strict=True)]

"""Lines of text files: plain, .gz or .xz, UTF-8.

They are unpacked and given out as they are asked for, and no line takes more than LONGEST bytes of memory. So a small
file that unpacks to a huge one costs no more than that one would: nothing where lines are translated window by window.
"""

import codecs
import gzip
import lzma
import pathlib
import zlib
from collections.abc import Iterator, Sized
from typing import Any, BinaryIO

from transformer_flax.errors import UserError

OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}
DAMAGES = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, MemoryError)  # of a compressed file
LONGEST = 1 << 20  # bytes of a line; what has longer ones is no text of a sentence a line


def open_text(file: pathlib.Path) -> BinaryIO:
    stream: Any = OPENERS.get(file.suffix, open)(file, "rb")
    return stream


def text_folder(path: str) -> pathlib.Path:
    """The folder that config.data.path names.

    Raises:
      UserError: there is none.
    """
    if not path:
        raise UserError("config.data.path is empty: name the folder of texts with --config.data.path=FOLDER")
    if not pathlib.Path(path).is_dir():
        raise UserError(f"config.data.path is {path!r}: there is no such folder")
    return pathlib.Path(path)


def find_text(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    """The text `name` in a folder: plain, .gz or .xz; None if there is none."""
    files = [folder / f"{name}{suffix}" for suffix in OPENERS]
    return next((file for file in files if file.is_file()), None)


def require_text(folder: pathlib.Path, name: str) -> pathlib.Path:
    """`find_text`.

    Raises:
      UserError: there is none; tells what there is.
    """
    file = find_text(folder, name)
    if file is None:
        present = ", ".join(sorted(file.name for file in folder.iterdir())[:20]) or "nothing"
        raise UserError(f"{folder} has no {name} (nor .gz or .xz); it holds {present}")
    return file


def decode_lines(stream: BinaryIO, name: str, *, spoilt: list[str] | None = None) -> Iterator[str]:
    """The lines of a file without their ends; none is read before it is asked for.

    Args:
      stream: of bytes. The mark that some editors put at its start is left out.
      name: of the file, for messages.
      spoilt: told the places of lines that are not UTF-8, whose bytes are replaced by U+FFFD; None: they are refused.

    Raises:
      UserError: a line is not UTF-8 or far too long, or a compressed file is damaged.
    """
    number = 0
    try:
        for number, raw in enumerate(iter(lambda: stream.readline(LONGEST), b""), start=1):
            if len(raw) == LONGEST:
                raise UserError(
                    f"{name}, line {number:,}: longer than {LONGEST:,} bytes; a text has one sentence a line"
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


def require_characters(text: str, what: str) -> None:
    """Raises:
    UserError: the text holds half a character (a lone surrogate), as a str may and UTF-8 may not.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is {text[:80]!r}, which is not UTF-8 ({error.reason} at {error.start})") from error


def read_side_by_side(source: pathlib.Path, target: pathlib.Path) -> tuple[list[str], list[str]]:
    """The lines of two files that translate each other.

    Raises:
      UserError: one has more lines than the other, or cannot be read.
    """
    sides = []
    for file in (source, target):
        with open_text(file) as stream:
            sides.append(list(decode_lines(stream, str(file))))
    sources, targets = sides
    require_as_many(source, sources, target, targets)
    return sources, targets


def require_as_many(source: pathlib.Path, sources: Sized, target: pathlib.Path, targets: Sized) -> None:
    """Checks the lines of two files that translate each other.

    Raises:
      UserError: one has more of them than the other.
    """
    if len(sources) != len(targets):
        raise UserError(
            f"{source} has {len(sources):,} lines and {target} has {len(targets):,}: "
            "line N of one must translate line N of the other"
        )

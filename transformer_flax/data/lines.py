"""Lines of text at random, of which memory holds no more than where each one begins."""

import array
import contextlib
import itertools
import mmap
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from transformer_flax.errors import UserError

BLOCK = 1 << 20  # bytes; a text of no more needs no file


class Lines:
    """Lines that are read once and kept in a file without a name, memory-mapped, which is gone when they are.

    Whatever becomes of the file that they were read from, they stay what they were. Memory holds 8 bytes a line, and
    BLOCK bytes of a short text.

    Args:
      lines: without their ends.
      folder: where the file lies.

    Raises:
      UserError: the file cannot be written.
    """

    text: bytes | mmap.mmap  # UTF-8, each line closed by a line feed

    def __init__(self, lines: Iterable[str], folder: pathlib.Path):
        starts = array.array("q", [0])  # grows in place, unlike anything of NumPy's
        blocks = _encode(lines, starts)
        first = next(blocks)
        second = next(blocks, None)
        self.text = first if second is None else _store(itertools.chain([first, second], blocks), folder)
        self._starts = np.frombuffer(starts, np.int64)  # of each line, and of one behind the last: [lines + 1]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        place = range(len(self))[index]
        return self.text[self._starts[place] : self._starts[place + 1] - 1].decode()

    def __getitems__(self, indices: Sequence[int]) -> list[str]:
        """The lines at `indices`, in their order: many at once come faster than one by one."""
        places = np.asarray(indices, np.int64)
        starts, ends = self._starts[places].tolist(), (self._starts[places + 1] - 1).tolist()
        return [self.text[start:end].decode() for start, end in zip(starts, ends, strict=True)]


def _encode(lines: Iterable[str], starts: array.array) -> Iterator[bytes]:
    """The text in blocks, at least one; `starts` is told where each line ends and the next one starts."""
    block = bytearray()
    end = 0
    for line in lines:
        if len(block) >= BLOCK:
            yield bytes(block)
            block.clear()
        raw = line.encode()
        block += raw
        block += b"\n"
        end += len(raw) + 1
        starts.append(end)
    yield bytes(block)


def _store(blocks: Iterator[bytes], folder: pathlib.Path) -> mmap.mmap:
    """The blocks, one after the other, in a file without a name."""
    size = 0

    @contextlib.contextmanager
    def writing() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            needed = size + sum(len(block) for block in blocks)
            raise UserError(
                f"a text needs {needed / 1e6:,.1f} MB in {folder} while it is prepared, which cannot be written "
                f"({error}); make room there, or name another place with --config.data.cache_dir"
            ) from error

    with contextlib.ExitStack() as stack:
        with writing():
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
        for block in blocks:
            size += len(block)
            with writing():
                left = memoryview(block)
                while left:  # a disk takes what it has room for, and refuses the rest
                    left = left[file.write(left) :]
        with writing():
            os.fsync(file.fileno())  # over a network, that there is no room may not have been said before
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

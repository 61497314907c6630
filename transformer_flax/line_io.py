"""What commands share that put out something for each line: files, pipes or a prompt in, a file or a pipe out."""

import contextlib
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from absl import flags

from transformer_flax.data.text_files import DAMAGES, LONGEST, decode_lines, open_text
from transformer_flax.errors import UserError

flags.disclaim_key_flags()  # a flag defined here is one of the command that asks for it, and in its --help
logger = logging.getLogger(__name__)


class Streams:
    """Defines the flags of a command's input and output, and opens what they and its arguments name."""

    def __init__(self):
        self._output = flags.DEFINE_string("output", None, "write to this file in place of standard output")
        self._invalid = flags.DEFINE_enum(
            "invalid", "replace", ["replace", "refuse"], "what to do with lines that are not UTF-8"
        )
        self._long = flags.DEFINE_enum(
            "long", "cut", ["cut", "refuse"], "what to do with lines longer than --max_input_length"
        )

    @property
    def refuse_long(self) -> bool:
        return self._long.value == "refuse"

    def open_inputs(self, stack: contextlib.ExitStack, files: Sequence[str]) -> list[BinaryIO]:
        """The files, or standard input where there are none."""
        return [stack.enter_context(open_input(file)) for file in files] or [sys.stdin.buffer]

    def open_output(self, stack: contextlib.ExitStack, inputs: Sequence[BinaryIO]) -> BinaryIO:
        """Opened before the work, so that it is refused before it; what a file holds is there until `put_out`."""
        name = self._output.value
        if name is None:
            return sys.stdout.buffer
        if os.path.isfile(name) and any(os.path.samestat(os.stat(name), os.fstat(file.fileno())) for file in inputs):
            raise UserError(f"{name} is an input; write to another file")
        return stack.enter_context(open(name, "ab"))

    def read(self, files: Sequence[BinaryIO]) -> Iterator[str]:
        """The lines of files, one after the other; none is read before it is asked for."""
        spoilt: list[str] = []
        for file in files:
            name = getattr(file, "name", "the input")  # which .xz does not tell
            yield from decode_lines(file, name, spoilt=None if self._invalid.value == "refuse" else spoilt)
        if spoilt:
            logger.warning("%d lines are not UTF-8 (%s first); bytes were replaced by U+FFFD", len(spoilt), spoilt[0])

    def watch(self, stack: contextlib.ExitStack, lines: Any, inputs: Sequence[BinaryIO]) -> Callable[[int], None]:
        """A bar on standard error that is told how many lines are done."""
        if not sys.stderr.isatty() or (self._output.value is None and sys.stdout.isatty()):
            return lambda done: None  # nobody watches, or the lines themselves are the progress
        from transformer_flax.console import Progress

        update = stack.enter_context(stack.enter_context(Progress(stderr=True)).bar("lines"))
        of = len(lines) if isinstance(lines, list) else _count_lines(inputs)
        return lambda done: update(done, of)

    def begin(self, out: BinaryIO) -> None:
        """The work begins: the file that is written to is emptied, now that nothing can be refused any more."""
        self._started = time.perf_counter()
        if self._output.value is not None and os.path.isfile(self._output.value):  # and no pipe
            out.truncate(0)

    def put_out(self, out: BinaryIO, results: Iterable[str]) -> str:
        """Writes a line for each result as soon as it is there; tells how many, and how fast."""
        done = 0
        for result in results:
            out.write(f"{result}\n".encode())
            out.flush()  # so that a prompt is answered, and a closed pipe noticed, at once
            done += 1
        seconds = time.perf_counter() - self._started
        from transformer_flax.console import counted

        return f"{counted(done, 'line')} in {counted(round(seconds), 'second')}, {done / seconds:,.1f} a second"


def open_input(name: str) -> BinaryIO:
    if os.path.isdir(name):
        raise UserError(f"{name} is a directory, not a text; a run is named by --workdir={name}")
    return open_text(pathlib.Path(name))


def prompt() -> Iterator[str]:
    """The lines that are typed."""
    import readline  # noqa: F401  it gives input() its history and line editing

    with contextlib.suppress(EOFError):
        while True:
            line = input("> " if sys.stdout.isatty() else "")
            yield line.encode(errors="surrogateescape").decode(errors="replace")  # what was typed may not be UTF-8
    print(file=sys.stderr)


def _count_lines(files: Sequence[BinaryIO]) -> int | None:
    """None where reading them ahead would lose them, or finds one damaged."""
    if not all(file.seekable() for file in files):
        return None
    total = 0
    for file in files:
        start = file.tell()
        try:
            total += sum(1 for _ in iter(lambda file=file: file.readline(LONGEST), b""))
        except DAMAGES:
            return None  # whoever reads it tells where
        finally:
            file.seek(start)
    return total

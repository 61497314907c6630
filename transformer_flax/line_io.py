"""Input and output of commands that write a line for each line they read: files, pipes or a prompt."""

import contextlib
import logging
import os
import pathlib
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, BinaryIO

from absl import flags

from transformer_flax.console import Progress, counted
from transformer_flax.data.text_files import DAMAGES, MOST_LINE_BYTES, decode_lines, open_text
from transformer_flax.errors import UserError
from transformer_flax.files import named_errors, require_other

flags.disclaim_key_flags()  # so that --help of each command lists the flags defined here
logger = logging.getLogger(__name__)


class LineIO:
    """The input and output of a command, and their flags. Iterating yields the lines of the input, read on request."""

    def __init__(self):
        self._output = flags.DEFINE_string("output", None, "write to this file instead of standard output")
        self._invalid = flags.DEFINE_enum("invalid", "replace", ["replace", "refuse"], "treatment of non-UTF-8 lines")
        help_string = "treatment of lines longer than --max_input_length"
        self._long = flags.DEFINE_enum("long", "cut", ["cut", "refuse"], help_string)

    @contextlib.contextmanager
    def opened(self, files: Sequence[str], *, beside: str | None = None) -> Generator[None]:
        """Context manager: opens the files, or standard input if there are none, and the output, without changing it.

        `beside` names a file that has a line for each line of the input. With such a file, there is no prompt. Raises a
        UserError if the output is one of the inputs, and an OSError if a file cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            self.inputs = [stack.enter_context(open_input(file)) for file in files] or [sys.stdin.buffer]
            self.name, self.output = self._output.value, sys.stdout.buffer  # None: standard output
            if self.name is not None:
                require_other(self.name, [*(file.fileno() for file in self.inputs), *([beside] if beside else [])])
                self.output = stack.enter_context(open(self.name, "ab", buffering=0))  # no second error when closed
            self.prompts = not files and beside is None and sys.stdin.isatty()  # the input is a terminal
            yield

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the model's translator or classifier that follow from the input."""
        return {"refuse_long": self._long.value == "refuse"} | ({"window": 1} if self.prompts else {})

    def __iter__(self) -> Iterator[str]:
        return _prompt() if self.prompts else self.read(self.inputs)

    def read(self, files: Sequence[BinaryIO]) -> Iterator[str]:
        """Yields the lines of files. Invalid lines are refused or replaced, as in the input."""
        spoilt: list[str] = []
        for file in files:
            name = getattr(file, "name", "the input")  # .xz files have no name
            yield from decode_lines(file, name, spoilt=None if self._invalid.value == "refuse" else spoilt)
        if spoilt:
            lines = counted(len(spoilt), "line")
            logger.warning("not UTF-8: %s, %s first; invalid bytes were replaced by U+FFFD", lines, spoilt[0])

    @contextlib.contextmanager
    def writing(
        self, model: Any, *, count: int | None = None
    ) -> Generator[tuple[Callable[[str], None], Callable[[int], None]]]:
        """Context manager: replaces what the output holds, and prints the count and the rate of the results at the end.

        Yields two functions: one writes a result, and one takes the number of lines done, for the progress bar.
        Without `count`, there are as many results as lines in the input, which must not have been read yet.
        """
        started, written = time.perf_counter(), 0

        def empty() -> None:
            if self.name is not None and os.path.isfile(self.name):  # not a pipe
                self.output.truncate(0)

        def write(result: str) -> None:
            nonlocal written
            if not written:  # not before, as the input may be refused
                empty()
            with named_errors(self.name or "standard output"):
                line = memoryview(f"{result}\n".encode())
                while line:  # without a buffer, a write may be short
                    line = line[self.output.write(line) :]
                self.output.flush()  # at once, because a prompt waits for it, and to notice a closed pipe
            written += 1

        seen = sys.stderr.isatty() and not self.prompts and (self.name is not None or not sys.stdout.isatty())
        with Progress(stderr=True, quiet=not seen) as progress, progress.bar("lines") as update:
            of = _count_lines(self.inputs) if seen and count is None else count
            yield write, lambda done: update(done, of)
        if not written:
            empty()
        if not self.prompts:
            seconds = time.perf_counter() - started
            rate = (
                f"{counted(written, 'line')} in {counted(round(seconds), 'second')}, {written / seconds:,.1f} a second"
            )
            print(f"{rate}; {counted(model.compilations, 'compilation')}", file=sys.stderr)


def open_input(name: str) -> BinaryIO:
    if os.path.isdir(name):
        raise UserError(f"{name} is a directory, not a text; to name a run, use --workdir={name}")
    return open_text(pathlib.Path(name))


def _prompt() -> Iterator[str]:
    """Yields the lines that are typed."""
    import readline  # noqa: F401  gives input() history and line editing

    sys.stdin.reconfigure(errors="surrogateescape")  # pyrefly: ignore (a TextIOWrapper); terminals may send any bytes
    with contextlib.suppress(EOFError):
        while True:
            line = input("> " if sys.stdout.isatty() else "")
            yield line.encode(errors="surrogateescape").decode(errors="replace")
    print(file=sys.stderr)


def _count_lines(files: Sequence[BinaryIO]) -> int | None:
    """Returns the number of lines; None for pipes (not readable twice) and damaged files (refused when read)."""
    if not all(file.seekable() for file in files):
        return None
    total = 0
    for file in files:
        start = file.tell()
        try:
            total += sum(1 for _ in iter(lambda file=file: file.readline(MOST_LINE_BYTES), b""))
        except DAMAGES:
            return None
        finally:
            file.seek(start)
    return total

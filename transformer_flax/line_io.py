"""Input and output of commands that write a line for each line they read: files, pipes or a prompt."""

import contextlib
import dataclasses
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

flags.disclaim_key_flags()  # so that --help of each command lists the flags defined here
logger = logging.getLogger(__name__)


class LineIO:
    """The flags of a command's input and output."""

    def __init__(self):
        self._output = flags.DEFINE_string("output", None, "write to this file instead of standard output")
        self._invalid = flags.DEFINE_enum("invalid", "replace", ["replace", "refuse"], "treatment of non-UTF-8 lines")
        self._long = flags.DEFINE_enum(
            "long", "cut", ["cut", "refuse"], "treatment of lines longer than --max_input_length"
        )

    @contextlib.contextmanager
    def opened(self, files: Sequence[str], *, prompt: bool = True) -> Iterator["Lines"]:
        """Context manager: opens the files (standard input if none are given) and the output, not changed yet.

        Raises:
          UserError: the output is one of the inputs.
          OSError: a file cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            inputs = [stack.enter_context(open_input(file)) for file in files] or [sys.stdin.buffer]
            name, output = self._output.value, sys.stdout.buffer
            if name is not None:
                if os.path.isfile(name) and any(os.path.samestat(os.stat(name), os.fstat(i.fileno())) for i in inputs):
                    raise UserError(f"{name} is an input; write to another file")
                output = stack.enter_context(open(name, "ab"))
            prompts = prompt and not files and sys.stdin.isatty()
            yield Lines(inputs, output, name, prompts, self._invalid.value == "refuse", self._long.value == "refuse")


@dataclasses.dataclass(frozen=True)
class Lines:
    """The open input and output of a command."""

    inputs: list[BinaryIO]
    output: BinaryIO
    name: str | None  # the name of the output; None for standard output
    prompts: bool  # the input is a terminal
    refuse_invalid: bool
    refuse_long: bool

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the model's translator or classifier that follow from the input."""
        return {"refuse_long": self.refuse_long} | ({"batch_size": 1, "window": 1} if self.prompts else {})

    def __iter__(self) -> Iterator[str]:
        """Yields the lines of the input. Each line is read when it is requested."""
        return _prompt() if self.prompts else self.read(self.inputs)

    def read(self, files: Sequence[BinaryIO]) -> Iterator[str]:
        """Yields the lines of files. Invalid lines are refused or replaced, as in the input."""
        spoilt: list[str] = []
        for file in files:
            name = getattr(file, "name", "the input")  # .xz files have no name
            yield from decode_lines(file, name, spoilt=None if self.refuse_invalid else spoilt)
        if spoilt:
            logger.warning("%d lines are not UTF-8 (%s first); bytes were replaced by U+FFFD", len(spoilt), spoilt[0])

    def write(
        self, make: Callable[[Callable[[int], Any]], Iterable[str]], model: Any, *, count: int | None = None
    ) -> None:
        """Empties the output, and writes a line for each result as it is made. Then prints the count and the rate.

        Args:
          make: makes the results. It is given a function to call with the number of lines done.
          model: the model whose compilations are printed.
          count: the number of results. None: the number of lines in the input, which must not have been read yet.
        """
        from transformer_flax.console import Progress, counted

        started, done = time.perf_counter(), 0
        if self.name is not None and os.path.isfile(self.name):  # not a pipe
            self.output.truncate(0)
        seen = sys.stderr.isatty() and not self.prompts and (self.name is not None or not sys.stdout.isatty())
        with Progress(stderr=True, quiet=not seen) as progress, progress.bar("lines") as update:
            of = _count_lines(self.inputs) if seen and count is None else count
            for result in make(lambda done: update(done, of)):
                self.output.write(f"{result}\n".encode())
                self.output.flush()  # at once, because a prompt waits for it, and to notice a closed pipe
                done += 1
        if self.prompts:
            return
        seconds = time.perf_counter() - started
        rate = f"{counted(done, 'line')} in {counted(round(seconds), 'second')}, {done / seconds:,.1f} a second"
        print(f"{rate}; {counted(model.compilations, 'compilation')}", file=sys.stderr)


def open_input(name: str) -> BinaryIO:
    if os.path.isdir(name):
        raise UserError(f"{name} is a directory, not a text; to name a run, use --workdir={name}")
    return open_text(pathlib.Path(name))


def _prompt() -> Iterator[str]:
    """Yields the lines that are typed."""
    import readline  # noqa: F401  gives input() history and line editing

    with contextlib.suppress(EOFError):
        while True:
            line = input("> " if sys.stdout.isatty() else "")
            yield line.encode(errors="surrogateescape").decode(errors="replace")  # terminals may send invalid UTF-8
    print(file=sys.stderr)


def _count_lines(files: Sequence[BinaryIO]) -> int | None:
    """Returns the number of lines; None for pipes (not readable twice) and damaged files (refused when read)."""
    if not all(file.seekable() for file in files):
        return None
    total = 0
    for file in files:
        start = file.tell()
        try:
            total += sum(1 for _ in iter(lambda file=file: file.readline(LONGEST), b""))
        except DAMAGES:
            return None
        finally:
            file.seek(start)
    return total

"""Input and output of commands that write a line for each line they read: files, pipes or a prompt."""

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

flags.disclaim_key_flags()  # so that --help of each command lists the flags defined here
logger = logging.getLogger(__name__)


class LineIO:
    """Defines the flags of a command's input and output, reads the one and writes the other."""

    def __init__(self):
        self._output = flags.DEFINE_string("output", None, "write to this file instead of standard output")
        self._invalid = flags.DEFINE_enum("invalid", "replace", ["replace", "refuse"], "treatment of non-UTF-8 lines")
        self._long = flags.DEFINE_enum(
            "long", "cut", ["cut", "refuse"], "treatment of lines longer than --max_input_length"
        )

    @contextlib.contextmanager
    def opened(self, files: Sequence[str], *, prompt: bool = True) -> Iterator[Iterator[str]]:
        """A context with the lines of files; without files, of standard input, or a prompt if that is a terminal."""
        with contextlib.ExitStack() as self._stack:
            self._inputs = [self._stack.enter_context(open_input(file)) for file in files] or [sys.stdin.buffer]
            self._prompts = prompt and not files and sys.stdin.isatty()
            yield _prompt() if self._prompts else self.read(self._inputs)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the model's translator or classifier that follow from the input."""
        return {"refuse_long": self._long.value == "refuse"} | ({"batch_size": 1, "window": 1} if self._prompts else {})

    def read(self, files: Sequence[BinaryIO]) -> Iterator[str]:
        """Yields the lines of files, each read when it is asked for."""
        spoilt: list[str] = []
        for file in files:
            name = getattr(file, "name", "the input")  # .xz files have none
            yield from decode_lines(file, name, spoilt=None if self._invalid.value == "refuse" else spoilt)
        if spoilt:
            logger.warning("%d lines are not UTF-8 (%s first); bytes were replaced by U+FFFD", len(spoilt), spoilt[0])

    def open_output(self) -> None:
        """Opens the output before the work, without changing it: if it cannot be written, the work does not begin."""
        name, self._out = self._output.value, sys.stdout.buffer
        if name is None:
            return
        if os.path.isfile(name) and any(os.path.samestat(os.stat(name), os.fstat(i.fileno())) for i in self._inputs):
            raise UserError(f"{name} is an input; write to another file")
        self._out = self._stack.enter_context(open(name, "ab"))  # noqa: SIM115

    def start(self, lines: Any) -> Callable[[int], None]:
        """Empties the output file and starts the clock; returns a function that shows how many lines are done."""
        self._started = time.perf_counter()
        if self._output.value is not None and os.path.isfile(self._output.value):  # not a pipe
            self._out.truncate(0)
        if self._prompts or not sys.stderr.isatty() or (self._output.value is None and sys.stdout.isatty()):
            return lambda done: None
        from transformer_flax.console import Progress

        update = self._stack.enter_context(self._stack.enter_context(Progress(stderr=True)).bar("lines"))
        of = len(lines) if isinstance(lines, list) else _count_lines(self._inputs)
        return lambda done: update(done, of)

    def write(self, results: Iterable[str], model: Any) -> None:
        """Writes a line for each result as it comes; then prints the count, the rate and the model's compilations."""
        done = 0
        for result in results:
            self._out.write(f"{result}\n".encode())
            self._out.flush()  # at once: a prompt waits for it, and a closed pipe is noticed
            done += 1
        if self._prompts:
            return
        seconds = time.perf_counter() - self._started
        self._stack.close()  # the bar goes before the summary comes
        from transformer_flax.console import counted

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
    """Returns None for pipes, which cannot be read twice, and for damaged files, which are refused when read."""
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

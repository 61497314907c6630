"""Prints lines for a log, and progress bars on a terminal."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import rich.console
import rich.progress
import rich.table
import rich.text
from rich.markup import escape

LOGGED_SECONDS = 60
LOGGED_WIDTH = 200  # of tables in a log, whose readers search whole lines


class Progress(rich.progress.Progress):
    """A context manager that prints lines, above progress bars if the output is a terminal.

    Commands whose standard output holds their results print to `stderr`.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False):
        console = _Console(
            stderr=stderr,
            quiet=quiet,
            highlight=False,
            emoji=False,
            soft_wrap=True,
            # A notebook claims to be a terminal, and rich would make an HTML element of each line in it.
            force_jupyter=False,
            force_terminal=False if rich.console.Console().is_jupyter else None,
        )
        if not console.is_terminal:
            console.width = LOGGED_WIDTH
        super().__init__(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),  # the column that shrinks on a narrow terminal
            rich.progress.MofNCompleteColumn(),
            _TimeLeft(),
            rich.progress.TextColumn("{task.fields[note]}"),
            console=console,
            disable=quiet or not console.is_terminal,
            redirect_stdout=not stderr,  # otherwise, results would be drawn into the bars
            speed_estimate_period=300,  # seconds: some bars, such as a sweep's, move once a minute
        )
        self._has_begun = self._has_warned = False

    @contextlib.contextmanager
    def aside(self) -> Generator[None]:
        """Context manager: hides these bars while a library shows its own, which would otherwise be torn into lines."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def say(self, text: str) -> None:
        """Prints a line without interpreting markup."""
        self._print(self._writable(text), markup=False)

    def row(self, head: str, parts: Sequence[str], *, cut: bool = False) -> None:
        """Prints parts side by side, the most important first.

        Parts that do not fit into the width of a terminal follow on further lines. With `cut`, they are left out.
        """
        width = self.console.width if self.console.is_terminal else math.inf
        lines = [head]
        for part in parts:
            if len(lines[-1]) + len(part) + 2 <= width:
                lines[-1] += f"  {part}"
            elif cut:
                break
            else:
                lines.append(f"    {part}")
        self.say("\n".join(lines))

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table without interpreting markup. If all column names are empty, the table has no header."""
        table = rich.table.Table(title=escape(title), title_justify="left", show_header=any(columns))
        for column in columns:
            table.add_column(escape(column), overflow="fold")  # a signature that is cut off is useless
        for row in rows:
            table.add_row(*(escape(self._writable(cell)) for cell in row))
        self._print(table)

    def _writable(self, text: str) -> str:
        """Returns a text with escapes in place of letters that the output's encoding lacks."""
        return text.encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)

    def _print(self, what: str | rich.table.Table, **how: Any) -> None:
        """Prints. Work that has begun to show bars continues on a full disk, and without its reader, such as `tee`."""
        try:
            self.console.print(what, **how)
        except OSError as error:
            if not self._has_begun:
                raise
            if not self._has_warned:
                self._has_warned = True
                with contextlib.suppress(OSError):
                    text = f"WARNING: the output cannot be written ({error.strerror}); the command continues without it"
                    print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def bar(self, description: str, start: int = 0, *, logged: bool = False) -> Generator[Callable[..., None]]:
        """Context manager: shows a bar, and yields the function `update(done, of)` that advances the bar.

        `update` also takes `note=`, a text that stays until the next note, and `left=`, the seconds left, which replace
        the bar's own estimate. With `logged`, and without a terminal, a line is printed every minute.
        """
        self._has_begun = True
        task = self.add_task(escape(description), total=None, completed=start, note="")
        due = time.monotonic() + LOGGED_SECONDS if logged and not self.console.is_terminal else math.inf

        def update(done: int, of: int | None = None, **more: Any) -> None:
            nonlocal due
            self.update(task, completed=done, total=of, **more)
            if (now := time.monotonic()) >= due:
                due = now + LOGGED_SECONDS
                self.say(f"{description}: {done:,}" + (f" of {of:,}" if of else ""))

        try:
            yield update
        finally:
            self.remove_task(task)


class _Console(rich.console.Console):
    """A console that raises BrokenPipeError where rich ends the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True  # what is printed from now on is dropped; otherwise it is kept for another try
        raise  # the error that is being handled


class _TimeLeft(rich.progress.ProgressColumn):
    """A column with the time left: `left` if `update` was given it, otherwise the bar's own estimate."""

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        seconds = task.fields.get("left", task.time_remaining)
        return rich.text.Text("" if seconds is None else f"{duration(seconds)} left")


def counted(count: int, thing: str) -> str:
    """Returns a count with its noun: 1, "line" -> "1 line"; 2000, "line" -> "2,000 lines"."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Returns seconds as a text: 75 -> "1:15", 3675 -> "1:01:15", 216000 -> "2.5 days"."""
    if seconds >= 48 * 3600:
        return f"{seconds / 86_400:,.1f} days"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

"""Prints lines for a log, and progress bars on a terminal."""

import contextlib
from collections.abc import Callable, Iterator

import rich.console
import rich.progress
import rich.table
from rich.markup import escape


class Progress:
    """A context in which lines are printed, above the bars if the output is a terminal.

    Args:
      stderr: print to standard error, for commands whose standard output holds their results.
      quiet: print nothing.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False):
        self._console = rich.console.Console(stderr=stderr, quiet=quiet, highlight=False, emoji=False, soft_wrap=True)
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
            redirect_stdout=not stderr,  # results are not to be drawn into the bars
            speed_estimate_period=300,  # seconds: some bars move once a minute, as those of a sweep's runs
        )

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context that leaves the terminal to the bars of others, which would be torn into lines under these."""
        self._bars.stop()
        try:
            yield
        finally:
            self._bars.start()

    def say(self, text: str) -> None:
        """Prints a line as it is."""
        self._console.print(text, markup=False)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        table = rich.table.Table(title=escape(title), title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")  # a signature that is cut says nothing
        for row in rows:
            table.add_row(*map(escape, row))
        self._console.print(table)

    @contextlib.contextmanager
    def bar(self, description: str, start: int = 0) -> Iterator[Callable[..., None]]:
        """A bar that lasts as long as the context; yields `update(done, of)`; a `note=` stays until the next."""
        task = self._bars.add_task(escape(description), total=None, completed=start, note="")
        try:
            yield lambda done, of=None, **note: self._bars.update(task, completed=done, total=of, **note)
        finally:
            self._bars.remove_task(task)


def counted(count: int, thing: str) -> str:
    """1, "line" -> "1 line"; 2,000 -> "2,000 lines"."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """75 -> "1:15", 3675 -> "1:01:15"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

"""Prints lines for a log, and progress bars on a terminal."""

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterator

import rich.console
import rich.progress
import rich.table
import rich.text
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
            rich.progress.BarColumn(),  # narrower than the others leave it only on a narrow terminal
            rich.progress.MofNCompleteColumn(),
            _TimeLeft(),
            rich.progress.TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
            redirect_stdout=not stderr,  # results are not to be drawn into the bars
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

    def say(self, text: str, *more: str) -> None:
        """Prints lines. A terminal folds those that are longer than it is wide, at gaps of two blanks or more.

        Args:
          text: verbatim.
          more: parts for the end of the last line, the most important first; a terminal shows as many as fit.
        """
        width = self._console.width if self._console.is_terminal else None
        for part in more:
            if width is not None and len(text) + len(part) + 2 > width:
                break
            text += f"  {part}"
        if width is not None:
            text = "\n".join(_fold(line, width) for line in text.split("\n"))
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
        """A bar that lasts as long as the context; yields `update(done, of)`.

        `update` also takes a `note=`, which stays until the next, and seconds `left=`, in place of the bar's estimate.
        """
        task = self._bars.add_task(description, total=None, completed=start, note="")
        try:
            yield lambda done, of=None, **more: self._bars.update(task, completed=done, total=of, **more)
        finally:
            self._bars.remove_task(task)


class _TimeLeft(rich.progress.ProgressColumn):
    def render(self, task: rich.progress.Task) -> rich.text.Text:
        seconds = task.fields.get("left", task.time_remaining)
        return rich.text.Text("" if seconds is None else f"{duration(seconds)} left")


def _fold(line: str, width: int) -> str:
    """Folds a line that is too long, with a hanging indent. Words with single blanks between them stay together."""
    indent = " " * (len(line) - len(line.lstrip(" ")) + 4)
    wrapper = textwrap.TextWrapper(
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )
    wrapper.wordsep_simple_re = re.compile(r"( {2,})")
    return wrapper.fill(line) if len(line) > width else line


def counted(count: int, thing: str) -> str:
    """1, "line" -> "1 line"; 2,000 -> "2,000 lines"."""
    return f"{count:,} {thing}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """75 -> "1:15", 3675 -> "1:01:15"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

"""Shows a running sweep: a live table on a terminal, a line for each event elsewhere."""

import dataclasses

import rich.box
import rich.console
import rich.live
import rich.table
from rich.markup import escape

from transformer_flax.ablation.jobs import TrialProgress
from transformer_flax.ablation.results import FAILED, FINISHED
from transformer_flax.console import duration

WAITING, RUNNING = "waiting", "running"  # states beside those of results
STYLES = {WAITING: "dim", RUNNING: "bold", FINISHED: "green", FAILED: "red"}
HIDDEN_FIRST = (FINISHED, WAITING, FAILED, RUNNING)  # if the terminal has too few lines
WORDS = ("run", "variant", "state", "")  # columns aligned to the left
FRAME = 6  # lines of a table that are not rows


@dataclasses.dataclass
class Line:
    """A trial as the table shows it."""

    name: str
    steps: int
    state: str = WAITING
    progress: TrialProgress = dataclasses.field(default_factory=TrialProgress)
    note: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in (FINISHED, FAILED)

    def cells(self) -> list[str]:
        progress, left = self.progress, ""
        if self.state == RUNNING and progress.rate:
            left = duration((self.steps - progress.step) / progress.rate)
        return [
            self.name,
            self.state,
            f"{progress.step:,}/{self.steps:,}",
            "" if progress.loss is None else f"{progress.loss:.3f}",
            show_best(progress),
            "" if progress.source_gain is None else f"{progress.source_gain:.2f}",
            left,
            self.note,
        ]


class Board:
    """A context that shows the trials of a sweep.

    Args:
      console: to show them on; default: standard output.
    """

    def __init__(self, console: rich.console.Console | None = None):
        self._console = console or rich.console.Console(highlight=False, emoji=False, soft_wrap=True)
        self._live = rich.live.Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> "Board":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._live:
            self._live.stop()

    @property
    def is_live(self) -> bool:
        """Whether there is a terminal, on which the table is redrawn."""
        return self._live is not None

    def say(self, text: str) -> None:
        """Prints a line verbatim, above the table."""
        self._console.print(text, markup=False)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table that stays."""
        table = _table(title, columns)
        for row in rows:
            table.add_row(*map(escape, row))
        self._console.print(table)

    def update(self, lines: list[Line], summary: str) -> None:
        """Redraws the live table, if there is a terminal."""
        if not self._live:
            return
        excess = max(0, len(lines) - max(1, self._console.height - FRAME))
        order = sorted(range(len(lines)), key=lambda i: (HIDDEN_FIRST.index(lines[i].state), -i))
        hidden = set(order[:excess])
        table = _table("", ["run", "state", "step", "loss", "best", "source gain", "left", ""])
        for i, line in enumerate(lines):
            if i not in hidden:
                table.add_row(*map(escape, line.cells()), style=STYLES[line.state])
        table.caption = f"{summary}; {excess:,} more are not shown" if excess else summary
        table.caption_justify = "left"
        self._live.update(table, refresh=True)


def _table(title: str, columns: list[str]) -> rich.table.Table:
    table = rich.table.Table(title=escape(title) or None, title_justify="left", box=rich.box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold", justify="left" if column in WORDS else "right")
    return table


def show_best(progress: TrialProgress) -> str:
    """The best validation score so far: "BLEU 34.98", "accuracy 87.6%"."""
    if progress.best is None:
        return ""
    name, value = progress.best
    return f"BLEU {value:.2f}" if name == "BLEU" else f"{name} {value:.1%}"

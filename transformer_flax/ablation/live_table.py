"""What a sweep shows while it goes on: a live table of all runs on a terminal, a line for each event elsewhere."""

import dataclasses
import math

import rich.box
import rich.console
import rich.live
import rich.table
from rich.markup import escape

from transformer_flax.ablation.jobs import Standing
from transformer_flax.ablation.results import FAILED, FINISHED
from transformer_flax.console import duration

WAITING, RUNNING = "waiting", "running"  # or as results say
STYLES = {WAITING: "dim", RUNNING: "bold", FINISHED: "green", FAILED: "red"}
FIRST_CUT = (FINISHED, WAITING, FAILED, RUNNING)  # where a terminal has not lines enough
LEFT = ("run", "variant", "state", "")  # columns of words
AROUND = 6  # lines of a table that are no rows


@dataclasses.dataclass
class Line:
    """A run as it is shown."""

    name: str
    steps: int
    state: str = WAITING
    standing: Standing = dataclasses.field(default_factory=Standing)
    note: str = ""


class Board:
    """A context in which a sweep's runs are shown.

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
        """Whether there is a terminal, where the table is drawn anew."""
        return self._live is not None

    def say(self, text: str) -> None:
        """Prints a line as it is, above the table."""
        self._console.print(text, markup=False)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table that stays."""
        table = _table(title, columns)
        for row in rows:
            table.add_row(*map(escape, row))
        self._console.print(table)

    def update(self, lines: list[Line], summary: str) -> None:
        """Shows the runs as they are now, on a terminal."""
        if not self._live:
            return
        shown = _fit(lines, self._console.height - AROUND)
        table = _table("", ["run", "state", "step", "loss", "best", "source gain", "left", ""])
        for line in shown:
            table.add_row(*map(escape, _cells(line)), style=STYLES[line.state])
        hidden = len(lines) - len(shown)
        table.caption = f"{summary}; {hidden:,} more are not shown" if hidden else summary
        table.caption_justify = "left"
        self._live.update(table, refresh=True)


def _table(title: str, columns: list[str]) -> rich.table.Table:
    table = rich.table.Table(title=escape(title) or None, title_justify="left", box=rich.box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold", justify="left" if column in LEFT else "right")
    return table


def _cells(line: Line) -> list[str]:
    standing = line.standing
    left = ""
    if line.state == RUNNING and standing.rate:
        left = duration((line.steps - standing.step) / standing.rate)
    return [
        line.name,
        line.state,
        f"{standing.step:,}/{line.steps:,}",
        "" if standing.loss is None else f"{standing.loss:.3f}",
        show_best(standing),
        "" if standing.source_gain is None else f"{standing.source_gain:.2f}",
        left,
        line.note,
    ]


def show_best(standing: Standing) -> str:
    """The best validation score so far: "BLEU 34.98", "accuracy 87.6%"."""
    if standing.best is None:
        return ""
    name, value = standing.best
    return f"BLEU {value:.2f}" if name == "BLEU" else f"{name} {value:.1%}"


def show_seconds(seconds: float) -> str:
    return "?" if math.isnan(seconds) else duration(seconds)


def _fit(lines: list[Line], room: int) -> list[Line]:
    """As many lines as there is room for, in their order; those that tell least go first."""
    excess = max(0, len(lines) - max(1, room))
    order = sorted(range(len(lines)), key=lambda i: (FIRST_CUT.index(lines[i].state), -i))
    cut = set(order[:excess])
    return [line for i, line in enumerate(lines) if i not in cut]

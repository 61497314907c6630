"""What a terminal shows of a sweep, as far as it has room."""

import dataclasses

import rich.console

from transformer_flax.ablation import live_table
from transformer_flax.ablation.jobs import TrialProgress
from transformer_flax.ablation.live_table import Board, Line
from transformer_flax.ablation.results import FAILED, FINISHED


def lines() -> list[Line]:
    states = [FINISHED] * 30 + [FAILED] * 2 + [live_table.RUNNING] * 3 + [live_table.WAITING] * 25
    return [Line(f"run {i}", 1_000, state) for i, state in enumerate(states)]


def shown(lines, *, height) -> str:
    """What is left of a terminal's screen by a live table."""
    console = rich.console.Console(force_terminal=True, color_system=None, width=100, height=height, record=True)
    with Board(console) as live:
        live.update(lines, "60 runs")
    return console.export_text()


def test_a_terminal_has_room_for_what_tells_most():
    told = shown(lines(), height=20)
    for name in [30, 31, 32, 33, 34]:  # those that failed, or run
        assert f"run {name} " in told
    assert "60 runs; 46 more are not shown" in told
    assert "run 35 " in told  # the next that waits
    assert "run 59 " not in told
    assert "run 0 " not in told
    assert shown(lines(), height=100).count("run ") >= 60


def test_a_line_tells_how_far_a_run_is():
    progress = TrialProgress(step=250, loss=1.2345, best=("exact", 0.625), rate=2.0)
    told = shown([Line("base seed 0", 1_000, live_table.RUNNING, progress)], height=20)
    row = next(line for line in told.splitlines() if "base seed 0" in line)
    assert row.split() == ["base", "seed", "0", "running", "250/1,000", "1.234", "exact", "62.5%", "6:15"]
    best = dataclasses.replace(progress, best=("BLEU", 34.98))
    assert "BLEU 34.98" in shown([Line("base seed 0", 1_000, live_table.RUNNING, best)], height=20)
    failed = Line("base seed 0", 1_000, FAILED, progress, "out of memory")
    assert "out of memory" in shown([failed], height=20)


def test_elsewhere_only_lines_are_printed(capsys):
    with Board() as plain:
        plain.update(lines(), "60 runs")
        plain.say("run 0 begins [bold]")
    assert capsys.readouterr().out == "run 0 begins [bold]\n"


def test_brackets_are_text(capsys):
    told = shown([Line("a[bold]b seed 0", 10, FAILED, note="cannot read [/data/x]")], height=20)
    assert "a[bold]b seed 0" in told
    assert "cannot read [/data/x]" in told
    with Board() as plain:
        plain.table("runs[/b]", ["variant"], [["a[/c]"]])
    told = capsys.readouterr().out
    assert "runs[/b]" in told
    assert "a[/c]" in told

"""A run prints its progress to a file, and draws it on a terminal."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from unittest import mock

import pytest

from tests.commands.process import ENVIRONMENT, started
from tests.conftest import ROOT
from tests.forked import PATIENCE
from transformer_flax.console import Progress, duration

MEASURED = "loss 3.123", "ppl 12.10", "lr 1.20e-03", "6,789 tokens/s", "MFU 12%", "3.45 steps/s", "4:20 left"
SCORES = "accuracy 0.9999", "loss 0.9059", "perplexity 1.08", "source_gain 3.356", "bleu 35.42", "exact_match 0.999"
SENTENCE = (
    "    > a long output of a model, with  two blanks,  is printed as it is, however narrow the terminal might be" * 2
)
PRINTS = f"""
import time
from transformer_flax.console import Progress

with Progress() as progress, progress.bar("training") as update:
    update(300, 1000, left=None)
    update(320, 1000, left=260.4)
    progress.row("step     320/1,000", {MEASURED}, cut=True)
    progress.row("step     320 valid:", {SCORES})
    progress.say("{SENTENCE}")
    update(321, 1000, left=259)
    time.sleep(0.3)  # the bar is drawn ten times a second
"""


def on_terminal(columns: int) -> tuple[list[str], list[str]]:
    """Runs PRINTS on a terminal so wide; the lines that stay, and each state of the bar."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown = b""
    environment = ENVIRONMENT | {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    environment.pop("COLUMNS", None)
    with subprocess.Popen([sys.executable, "-c", PRINTS], env=environment, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        try:
            while block := os.read(terminal, 1 << 16):
                shown += block
        except OSError:  # nobody is at the other end any more
            os.close(terminal)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return [line for line in lines if "training" not in line], [line for line in lines if "training" in line]


def test_brackets_in_a_table_are_text(capsys):
    with Progress() as progress:
        progress.table("mine[/b]", ["split[i]"], [["a[bold]b"], ["[/data/x]"]])
    told = capsys.readouterr().out
    for text in ("mine[/b]", "split[i]", "a[bold]b", "[/data/x]"):
        assert text in told


@pytest.mark.parametrize(
    ("columns", "measured", "scores"),
    [
        (40, 1, [SCORES[:1], SCORES[1:3], SCORES[3:5], SCORES[5:]]),
        (80, 5, [SCORES[:3], SCORES[3:]]),
        (120, 7, [SCORES]),
    ],
)
def test_bar_step_and_time_left_stay_in_sight_and_lines_fit(columns, measured, scores):
    lines, bars = on_terminal(columns)
    for bar in bars:
        assert re.fullmatch(r"training [━╸╺]{5,40} +([03].*/.*)", bar)
        assert len(bar) <= columns
    assert bars[-1].endswith("321/1000 4:19 left")
    shown = "  ".join(["step     320/1,000", *MEASURED[:measured]])  # the rest stands in metrics.jsonl
    first, *others = ["  ".join(part) for part in scores]
    # A terminal selects the sentence as one line, wherever it breaks it.
    assert lines == [shown, f"step     320 valid:  {first}", *(f"    {other}" for other in others), SENTENCE]


def test_a_file_has_whole_rows(capsys):
    with Progress() as progress:
        progress.table("title", ["variant", "scores"], [["base", 150 * "x"]])
    assert 150 * "x" in capsys.readouterr().out


def test_a_file_has_whole_lines_and_no_bar(capsys):
    exec(PRINTS)
    measured, scores, sentence = capsys.readouterr().out.splitlines()
    assert measured == "  ".join(["step     320/1,000", *MEASURED])
    assert scores == "  ".join(["step     320 valid:", *SCORES])
    assert sentence == SENTENCE


@pytest.mark.parametrize("lost", ["a full disk", "a reader that has ended"])
def test_work_goes_on_without_output_that_cannot_be_written(lost):
    prints = """
import os, sys
from transformer_flax.console import Progress

progress = Progress()
with progress.bar("working"):
    progress.say("line")
for number in range(3):
    progress.say(f"line {number}")
    progress.table("title", ["a"], [["b"]])
print("done", file=sys.stderr)
os._exit(0)
"""
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as broken:
        output = full if lost == "a full disk" else broken
        done = subprocess.run(
            [sys.executable, "-c", prints],
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
    reason = "No space left on device" if lost == "a full disk" else "Broken pipe"
    warning = f"WARNING: the output cannot be written ({reason}); the command continues without it\n"
    assert (done.returncode, done.stderr) == (0, warning + "done\n")


def test_a_command_that_only_prints_ends_with_its_reader():
    with started("cost", "--config=configs/numbers.py", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait(PATIENCE) == 141
        assert process.stderr.read() == b""


def test_letters_that_the_output_lacks_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    with Progress() as progress:
        progress.say("für я")
        progress.table("", [""], [["я"]])
    lines = written.getvalue().decode("latin-1")
    assert "für \\u044f\n" in lines
    assert lines.count("\\u044f") == 2


def test_a_duration_has_the_unit_that_suits_it():
    seconds = {
        59.6: "1:00",
        75: "1:15",
        3_675: "1:01:15",
        172_799: "47:59:59",
        172_800: "2.0 days",
        216_000: "2.5 days",
    }
    assert {number: duration(number) for number in seconds} == seconds


def test_without_a_terminal_what_lasts_is_said_every_minute(monkeypatch, capsys):
    clock = iter([0, 59, 180, 181, 241])  # a long wait is one line, too
    monkeypatch.setattr("transformer_flax.console.time", mock.Mock(monotonic=lambda: next(clock)))
    with Progress() as progress, progress.bar("tokenising train", logged=True) as update:
        for done in (1000, 2000, 3000, 4000):
            update(done, 5000)
    assert capsys.readouterr().out == "tokenising train: 2,000 of 5,000\ntokenising train: 4,000 of 5,000\n"

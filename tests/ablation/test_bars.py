"""A terminal shows the runs of a sweep while it trains them."""

import io
import json
import re

from configs import numbers
from tests.ablation.test_results import HEAD
from tests.ablation.test_trials import Nowhere, trained
from transformer_flax import console
from transformer_flax.ablation.results import Journal
from transformer_flax.ablation.sweep import _Sweep
from transformer_flax.ablation.trials import TrialFactory
from transformer_flax.ablation.variants import make_variants
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.run_directory import RunDirectory


def watched(tmp_path, monkeypatch, *, terminal: bool) -> str:
    """Returns what is shown of a run that has trained 250 of 1,000 steps, and of one that has not begun."""
    output = io.StringIO()
    options = {
        "file": output,
        "force_terminal": terminal,
        "color_system": None,
        "width": 120 if terminal else 1_000,
    }  # in which no path is broken
    monkeypatch.setattr("transformer_flax.ablation.sweep.POLL", 0.5)  # bars are drawn every 0.1 s
    real = console._Console
    monkeypatch.setattr(console, "_Console", lambda **given: real(**given | options))
    base = numbers.get_config()
    (tmp_path / "mine.toml").write_text('"a[bold]b" = {model.dropout = 0.3}\n')
    factory = TrialFactory("configs/numbers.py", base, {}, tmp_path)
    trials = factory.trials(make_variants(base, "E", file=tmp_path / "mine.toml"), seeds=range(1))
    (RunDirectory(trials[1].path).checkpoints / "240").mkdir(parents=True)
    lines = [trained(250, 2.0, 1e9), trained(1000, 2.0, 1e9)]
    (trials[1].path / "metrics.jsonl").write_text(f"{json.dumps(lines[0])}\n")
    journal = Journal(tmp_path / "results.jsonl", HEAD)
    _Sweep(trials, factory, journal, Unfinished(), Interruption()).run(together=False)
    return output.getvalue()


class Unfinished(Nowhere):
    """Ends jobs at once, which their sweep finds unfinished."""

    def submit(self, jobs):
        self.jobs = list(jobs)


def test_a_terminal_shows_how_far_each_run_is(tmp_path, monkeypatch):
    told = watched(tmp_path, monkeypatch, terminal=True)
    assert "a[bold]b seed 0 resumes from step 240" in told
    line = next(line for line in told.splitlines() if "250/1000" in line)
    assert "a[bold]b seed 0" in line
    assert line.split("250/1000")[1].strip().endswith("loss 0.400")
    assert "2 running, 0 failed" in told


def test_elsewhere_only_lines_are_printed(tmp_path, monkeypatch):
    told = watched(tmp_path, monkeypatch, terminal=False).split("\n\n")[0]
    begins, resumes = "E seed 0 begins; log: ", "a[bold]b seed 0 resumes from step 240; log: "
    first, second = told.splitlines()[1:3]
    assert first == f"{begins}{tmp_path / 'E/seed0.log'}"
    assert re.fullmatch(rf"{re.escape(resumes + str(tmp_path))}/a_bold_b-\w{{8}}/seed0\.log", second)
    assert "running" not in told

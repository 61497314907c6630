"""The campaign in its short form; the long one: python -m tests.faults.campaign --kills=200."""

import signal

import pytest

from tests.faults.campaign import MODES, campaign

SHORT = {mode: MODES[mode] for mode in ("packed",)}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_killed_runs_end_as_if_nobody_had_touched_them(tmp_path, monkeypatch, number):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # for the campaign to change
    counts = campaign(tmp_path, 3, number=number, seed=0, modes=SHORT)
    assert sum(count["kills"] for count in counts.values()) == 3
    assert sum(count["runs"] for count in counts.values()) >= 1

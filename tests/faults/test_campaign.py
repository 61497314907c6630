"""The campaign in its short form; the long one: python -m tests.faults.campaign --kills=200."""

import signal

from tests.faults.campaign import MODES, campaign

SHORT = {"steps": 16, "checkpoint__every": 3, "eval__every": 6}


def test_killed_runs_end_as_if_nobody_had_touched_them(tmp_path):
    counts = campaign(tmp_path, 2, number=signal.SIGKILL, seed=0, modes={"packed": MODES["packed"] | SHORT})
    assert counts["packed"]["kills"] == 2
    assert counts["packed"]["runs"] >= 1

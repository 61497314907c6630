"""The campaign in its short form; the long one: python -m tests.faults.campaign --kills=200."""

import signal

from tests.faults.campaign import MODES, campaign

SHORT = {"steps": 16, "checkpoint__every": 3, "eval__every": 6, "data__tokens_per_batch": 512}


def test_killed_runs_end_as_if_nobody_had_touched_them(tmp_path):
    modes = {"one device": MODES["one device"] | SHORT}
    counts = campaign(tmp_path, 2, number=signal.SIGKILL, seed=0, modes=modes, twice=False)
    assert counts["one device"]["kills"] == 2
    assert counts["one device"]["runs"] >= 1

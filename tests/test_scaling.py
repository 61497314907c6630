"""The benchmark of section 3.2.1 runs, and measures what the section says of the softmax."""

import json
import subprocess
import sys

from tests.commands.process import ENVIRONMENT
from tests.conftest import ROOT


def test_without_its_scale_the_softmax_hardly_moves(tmp_path):
    options = ["--d_k=256", "--steps=10", "--seeds=1", f"--json={tmp_path / 'all.json'}"]
    command = [sys.executable, "benchmarks/scaling.py", *options, f"--picture={tmp_path / 'all.png'}"]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "all.json").read_text())
    derivative, largest = (
        {kind: value for kind, ((value,),) in figures[quantity].items()}
        for quantity in ("softmax's derivative", "largest weight")
    )
    assert derivative["dot"] < derivative["scaled_dot"] / 3
    assert largest["dot"] > 0.8 > 0.3 > largest["scaled_dot"]
    for quantity in ("gradient of W^Q and W^K", "loss"):
        assert figures[quantity].keys() == {"scaled_dot", "dot", "additive"}
        assert all(0 < value < 20 for ((value,),) in figures[quantity].values())
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")

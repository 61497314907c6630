"""The benchmark of section 3.2.1 runs, and measures what the section says of the softmax."""

import json

import pytest

from tests import forked


@pytest.mark.long
def test_without_its_scale_the_softmax_hardly_moves(tmp_path):
    options = ["--d_k=256", "--steps=10", "--seeds=1", f"--json={tmp_path / 'all.json'}"]
    result = forked.run("benchmarks/scaling.py", *options, f"--picture={tmp_path / 'all.png'}")
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

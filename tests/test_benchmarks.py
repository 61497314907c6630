"""The commands of the benchmarks are valid, and the benchmark of section 3.2.1 measures the softmax."""

import json
import subprocess
import sys

import pytest

from tests import forked
from tests.conftest import ROOT

CHECK = """
import os, runpy, shlex, sys
import transformer_flax.training.loop  # once for all

for command in sys.stdin.read().splitlines():
    words = shlex.split(command)
    _, target, *arguments = words[words.index("python") :]
    if target == "-m":
        target, *arguments = arguments
    if target == "pytest":
        assert all(os.path.exists(name) for name in arguments if name.startswith("tests/")), command
        continue
    if not (pid := os.fork()):  # each has flags of its own
        sys.argv = [target, *arguments, "--only_check_args"]
        (runpy.run_path if target.endswith(".py") else runpy.run_module)(target, run_name="__main__")
    _, status = os.waitpid(pid, 0)
    print(status, command)
"""


@pytest.mark.long
def test_the_commands_for_an_accelerator_are_valid():
    listed = subprocess.run(
        ["bash", "benchmarks/accelerator.sh", "--commands", "FOLDER"], cwd=ROOT, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    checked = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=ROOT, input=listed.stdout, capture_output=True, text=True
    )
    statuses = [line.partition(" ")[0] for line in checked.stdout.splitlines() if "python" in line]
    assert statuses == ["0"] * (listed.stdout.count("\n") - 1), checked.stdout + checked.stderr


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

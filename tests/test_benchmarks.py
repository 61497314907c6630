"""The benchmarks time what they say: their rivals do the same work. That of section 3.2.1 measures the softmax."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.decode import begin_without_cache, make_search
from tests import forked
from tests.conftest import ROOT, TINY
from transformer_flax.decoding.translator import as_step
from transformer_flax.model.registry import init_params
from transformer_flax.model.transformer import Transformer

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


def test_the_search_without_a_cache_finds_the_same():
    params = jax.tree.map(lambda x: 3 * x, init_params(TINY, jax.random.key(0)))
    source = jnp.array([[9, 8, 7, 2], [5, 2, 0, 0]])
    cached, plain = (
        make_search(begin, Transformer(TINY), params, source, 3, 6)() for begin in (as_step, begin_without_cache)
    )
    np.testing.assert_array_equal(cached.tokens, plain.tokens)
    np.testing.assert_allclose(cached.scores, plain.scores, atol=1e-4)
    assert np.all(np.sum(np.asarray(cached.tokens) != 0, axis=-1) == 6)


def test_the_ways_to_follow_ancestors_agree_and_are_timed():
    options = ["--batch_size=2", "--beam_size=3", "--length=5", "--layers=2", "--heads=2", "--depth=4", "--repeats=1"]
    result = forked.run("benchmarks/ancestors.py", *options)
    assert result.returncode == 0, result.stderr
    assert all(way in result.stdout for way in ("gather", "indices", "sums of products", "matrix products"))


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

"""docs/extending.md does what it says, in a copy of the code."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs/extending.md").read_text()
CHECK = """
import jax, numpy as np
from configs import bag, numbers, table3
from transformer_flax.ablation.variants import make_variants
from transformer_flax.model.flops import count_parameters, forward_flops
from transformer_flax.training.loss import classification_loss
from transformer_flax.training.config_checks import check, model_config
from transformer_flax.model.registry import init_params, make_model

row, = (variant for variant in make_variants(numbers.get_config(), "swiglu"))
check(row.config)
base, swiglu = (model_config(config, 320) for config in (numbers.get_config(), row.config))
assert (base.ffn, swiglu.ffn, table3.get_config("swiglu").model.ffn) == ("relu", "swiglu", "swiglu")
more = {n: k - count_parameters(base)[n] for n, k in count_parameters(swiglu).items() if k != count_parameters(base)[n]}
assert more == dict.fromkeys(("encoder/feed_forward", "decoder/feed_forward"), 2 * (128 * 256 + 256)), more
lengths = np.array([5]), np.array([7])
flops = [sum(forward_flops(model, *lengths).values()) for model in (base, swiglu)]
assert flops[1] - flops[0] == 2 * 2 * (5 + 7) * 128 * 256

check(bag.get_config())
model = model_config(bag.get_config(), 50)
params = init_params(model, jax.random.key(0))
assert count_parameters(model) == {"embedding": 50 * 128, "output": 128 * 2 + 2}
loss_fn = classification_loss(make_model(model), 0.1)
source, target = np.array([[5, 6, 2, 0], [7, 2, 0, 0]]), np.array([[3], [4]])
loss = lambda params: loss_fn(params, {"source": source, "target": target}, jax.random.key(1))[0]["loss"]
assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(jax.grad(loss)(params)))
"""


def apply(diff: str, root: pathlib.Path) -> None:
    """Replaces the lines of a diff that are there before, in the order of the file, by those after."""
    name, *lines = diff.splitlines()
    text = (root / name).read_text()
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
    if after in text:  # somebody follows the page in a clone
        return
    assert text.count(before) == 1, f"{name} has not once the lines\n{before}"
    (root / name).write_text(text.replace(before, after))


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> pathlib.Path:
    """A copy of the code with every step of the page."""
    root = tmp_path_factory.mktemp("extended")
    for folder in ("transformer_flax", "configs", "tests"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "docs").mkdir()
    for file in ("pyproject.toml", "docs/sweeps.md"):
        shutil.copy(ROOT / file, root / file)
    for language, block in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL):
        if language == "diff":
            apply(block, root)
        elif language == "python":
            name, content = block.removeprefix("# ").split("\n", 1)
            # Somebody who follows the page in a clone has the file already.
            assert not (root / name).exists() or (root / name).read_text() == content
            (root / name).write_text(content)
    return root


def run(root: pathlib.Path, *command: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(root)}
    result = subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_field_the_row_and_the_kind_are_known_everywhere(extended):
    run(extended, "-c", CHECK)


@pytest.mark.long
def test_the_tests_of_the_page_pass(extended):
    files = {file for line in re.findall(r"^pytest (.*)$", PAGE, re.MULTILINE) for file in line.split()}
    files -= {"tests/test_house.py"}  # of the whole clone
    assert len(files) == 4
    run(extended, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sorted(files))


def test_the_code_of_the_page_is_in_the_style_of_the_project(extended):
    ruff = pathlib.Path(sys.executable).parent / "ruff"
    for command in (["check"], ["format", "--check"]):
        places = ("transformer_flax", "configs", "tests/model")
        result = subprocess.run([ruff, *command, *places], cwd=extended, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr

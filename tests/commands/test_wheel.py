"""The wheel alone, in another folder: all commands, with the configs."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.commands.process import ENVIRONMENT
from tests.conftest import ROOT

SMALL = (
    "--config=configs/numbers.py --config.steps=2 --config.data.num_pairs=1000 --config.data.tokens_per_batch=512 "
    "--config.model.num_layers=1 --config.model.d_model=16 --config.model.d_ff=16 --config.model.num_heads=2 "
    "--config.model.d_k=8 --config.model.d_v=8 --config.eval.sentences=4 --config.eval.test=False "
    "--config.data.cache_dir=cache --config.decode.max_extra_length=2 --config.decode.batch_size=16 "
    "--config.eval.final_sentences=4 --config.parallel.num_devices=1 --config.data.num_buckets=1"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that holds what the wheel installs."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"  # builds may write beside what they build
    shutil.copytree(
        ROOT / "transformer_flax", source / "transformer_flax", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "configs", source / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    alone = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", "-q", *alone, "--wheel-dir", str(place), str(source)], check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "install", "-q", *alone, "--target", str(place / "site"), str(wheel)], check=True)
    return place / "site"


def run(installed, folder, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(installed / "bin/transformer-flax"), *arguments],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )


def succeeds(*arguments) -> str:
    result = run(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_wheel_has_the_configs_the_page_and_the_mark_of_types(installed):
    shipped = installed / "transformer_flax/shipped/configs"
    ours = {file.name: file.read_bytes() for file in (ROOT / "configs").glob("*.py")}
    assert {file.name: file.read_bytes() for file in shipped.glob("*.py")} == ours
    for name in ("analysis/attention_page.html", "py.typed"):
        assert (installed / "transformer_flax" / name).exists()
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"transformer_flax", "bin"}


def test_a_wheel_trains_and_counts_in_another_folder(installed, tmp_path):
    assert "resuming" not in succeeds(installed, tmp_path, "train", *SMALL.split(), "--workdir=run")
    assert (tmp_path / "run/config.json").exists()
    (tmp_path / "mine.py").write_text("from configs.table3 import get_config\n")
    counted = ["--config=mine.py:A-h1", "--config.model.num_layers=1", "--json"]
    assert '"config": "table3-A-h1"' in succeeds(installed, tmp_path, "cost", *counted)
    where = "import transformer_flax; print(transformer_flax.__file__)"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    found = subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.startswith(str(installed))


def test_the_command_lists_its_commands(installed, tmp_path):
    import transformer_flax

    assert succeeds(installed, tmp_path, "--version").strip() == transformer_flax.__version__
    help_text = succeeds(installed, tmp_path)
    modules = (installed / "transformer_flax").glob("*.py")
    commands = [module.stem for module in modules if "    cli.run(main" in module.read_text()]
    assert "translate" in commands
    assert all(f"\n  {command} " in help_text for command in commands)
    result = run(installed, tmp_path, "tranlsate")
    assert result.returncode == 2
    assert "there is no command 'tranlsate'; did you mean 'translate'?" in result.stderr


@pytest.mark.long
def test_a_wheel_translates_with_what_it_has_trained(installed, tmp_path):
    succeeds(installed, tmp_path, "train", *SMALL.split(), "--workdir=run")
    (tmp_path / "in.txt").write_text("one\n\ntwo\n")
    assert succeeds(installed, tmp_path, "translate", "--workdir=run", "in.txt").count("\n") == 3

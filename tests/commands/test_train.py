"""`python train.py` as a user meets it: real processes, their messages and exit codes."""

import os
import subprocess
import sys

import pytest

from tests.commands import process
from tests.conftest import ROOT


def run(*arguments, **environment):
    command = [sys.executable, "train.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def refused(*arguments) -> str:
    """The one message of a command that the user got wrong."""
    result = run(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--config=configs/nope.py",
            "configs/nope.py cannot be loaded: there is no such file; there are configs/base.py",
        ),
        ("--config=configs/table3.py:A-h17", "table 3 has no row 'A-h17' (did you mean 'A-h1'"),
        ("--config=configs/numbers.py:A-h1", "takes no argument behind a colon"),
        ("--config.model.num_head=3", "did you mean 'num_heads'?"),
        (
            "--config.nope.field=3",
            "this config has no field 'nope'; the config file, and those it imports, list its fields",
        ),
        ("--config.model.d_model=wide", "flag --config.model.d_model=wide: invalid literal for int()"),
        ("--config.steps=1.5", "flag --config.steps=1.5: invalid literal for int()"),
        ("--stpes=3", "Unknown command line flag 'stpes'"),
        ("configs/base.py", "unexpected argument 'configs/base.py'"),
    ],
)
def test_wrong_flags_get_one_clear_message(argument, message):
    assert message in refused(argument)


def test_a_mistake_in_a_config_file_is_told_before_anything_is_read(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from configs import base\n\ndef get_config():\n    c = base.get_config()\n    c.stepz = 3\n    return c\n"
    )
    message = refused(f"--config={tmp_path}/mine.py", f"--workdir={tmp_path}/run")
    assert message == f"{tmp_path}/mine.py: config.stepz is an unknown field; did you mean 'steps'?"


def test_a_rival_s_config_is_told_of_what_it_has_not():
    message = refused("--config=configs/recurrent.py", "--config.model.num_heads=4")
    assert message.startswith("--config.model.num_heads=4: this config has no field 'num_heads'; ")


def test_a_config_of_word_vectors_is_refused():
    for more in ([], ["--seeds=0,1"]):
        message = refused("--config=configs/vectors.py", *more)
        assert "no section config.model; configs/vectors.py is for python -m transformer_flax.vectors" in message
    for command in ("cost", "sweep"):
        assert "no section config.model" in process.refused(command, "--config=configs/vectors.py")


def test_a_model_that_cannot_be_is_refused_before_anything_is_written(tmp_path):
    message = refused(f"--workdir={tmp_path / 'run'}", "--config.model.d_model=127")
    assert message == "config.model.d_model is 127; it must be even: sinusoids come in pairs of a sine and a cosine"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "parameters", "name"),
    [
        ("table3.py:B-dk16", "37,023,744", "wmt14_translate/de-en"),
        ("en_fr.py", "60,485,632 parameters with a vocabulary of 32,000, 44,101,632", "wmt14_translate/fr-en"),
    ],
)
def test_wmt14_without_tensorflow_or_network_is_told_behind_the_size_of_its_model(tmp_path, config, parameters, name):
    nowhere = {"TFDS_DATA_DIR": str(tmp_path), "http_proxy": "http://127.0.0.1:9"}  # nothing listens there
    result = run(f"--config=configs/{config}", f"--workdir={tmp_path / 'run'}", **nowhere)
    assert result.returncode == 2
    assert f"{parameters} without" in result.stdout
    assert "error: " in result.stderr
    assert name in result.stderr
    assert "configs/multi30k.py" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_help_tells_of_config_and_workdir():
    result = run("--help")
    assert result.returncode == 0
    assert "--config:" in result.stdout
    assert "(default: configs/numbers.py)" in result.stdout
    assert "--config.model.num_heads=16" in result.stdout
    assert "--workdir:" in result.stdout

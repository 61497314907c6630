"""`python train.py` as a user meets it: its messages and exit codes."""

import subprocess
import sys

import pytest

from tests import forked
from tests.commands import process
from tests.conftest import ROOT


def refused(*arguments) -> str:
    """The one message of a command that the user got wrong."""
    result = forked.run("train.py", *arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ").strip()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--stpes=3", "unknown flag --stpes; did you mean --config.steps?"),
        ("configs/base.py", "unexpected argument 'configs/base.py'; options are written --name=value, see --help"),
        ("--seeds=2 --config.seed=1", "--config.seed has no effect with --seeds: leave one of them out"),
    ],
)
def test_wrong_flags_get_one_clear_message(argument, message):
    assert refused(*argument.split()) == message


def test_a_mistake_in_a_config_file_is_told_before_anything_is_read(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from configs import base\n\ndef get_config():\n    c = base.get_config()\n    c.stepz = 3\n    return c\n"
    )
    message = refused(f"--config={tmp_path}/mine.py", f"--workdir={tmp_path}/run")
    assert message == f"{tmp_path}/mine.py: config.stepz is an unknown field; did you mean 'steps'?"


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
        ("en_fr.py:big", "209,051,648 parameters with a vocabulary of 32,000, 176,283,648", "wmt14_translate/fr-en"),
    ],
)
def test_wmt14_without_tensorflow_or_network_is_told_behind_the_size_of_its_model(tmp_path, config, parameters, name):
    nowhere = {"TFDS_DATA_DIR": str(tmp_path), "http_proxy": "http://127.0.0.1:9"}  # nothing listens there
    result = forked.run("train.py", f"--config=configs/{config}", f"--workdir={tmp_path / 'run'}", **nowhere)
    assert result.returncode == 2
    assert f"{parameters} without" in result.stdout
    assert "error: " in result.stderr
    assert name in result.stderr
    assert "configs/multi30k.py" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_help_tells_of_config_and_workdir():
    result = subprocess.run([sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0
    assert "--config:" in result.stdout
    assert "(default: configs/numbers.py)" in result.stdout
    assert "--config.data.vocab_size=8000" in result.stdout
    assert "configs/base.py explains" in " ".join(result.stdout.split())
    assert "--workdir:" in result.stdout

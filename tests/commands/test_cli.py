import os
import signal
import subprocess
import sys
import types

import pytest

from tests.commands.process import run, started
from tests.conftest import ROOT, long
from tests.forked import PATIENCE
from transformer_flax.__main__ import COMMANDS
from transformer_flax.arguments import load_config
from transformer_flax.cli import _unraisable, require_writable
from transformer_flax.errors import UserError

SIGNALLED_WHILE_COLLECTING = """
import gc, signal, time
from transformer_flax import cli


def main():
    def collecting(phase, info):
        gc.callbacks.remove(collecting)
        signal.raise_signal({number})  # what it raises, nobody can catch here

    gc.callbacks.append(collecting)
    gc.collect(0)  # the young objects alone, which takes less time than the signal waits to come again
    time.sleep({seconds})


cli.run(main, afterwards="the same command goes on from the last checkpoint")
"""
SIGNALLED_WHILE_COMPILING = """
import functools, signal, threading, time
import jax, jax.numpy as jnp
from transformer_flax import cli


def main():
    program = lambda x: functools.reduce(lambda x, number: jnp.sin(x @ x) + number, range(1500), x)
    threading.Thread(target=jax.jit(program).lower(jnp.ones((8, 8))).compile, daemon=True).start()
    time.sleep(0.5)
    signal.raise_signal({number})


cli.run(main)
"""
NOT_A_DIRECTORY = """
import pathlib
from transformer_flax import cli

cli.run(lambda: pathlib.Path("README.md/run").mkdir(), afterwards="the same command goes on from the last checkpoint")
"""
BASED = """from configs import {module}


def get_config():
    config = {module}.get_config()
    {mistake}
    return config
"""


@pytest.mark.parametrize(
    ("number", "seconds", "status", "last"),
    [
        (signal.SIGINT, 60, 130, ["interrupted"]),
        (signal.SIGTERM, 60, 143, []),
        (signal.SIGINT, 0, 0, []),  # nothing is left to interrupt
    ],
)
def test_a_signal_is_not_lost_to_the_garbage_collector(number, seconds, status, last):
    program = SIGNALLED_WHILE_COLLECTING.format(number=int(number), seconds=seconds)
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert result.returncode == status
    assert result.stderr.splitlines()[-1:] == last


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_a_program_compiles_ends_without_a_crash(number, status):
    program = SIGNALLED_WHILE_COMPILING.format(number=int(number))
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert result.returncode == status, result.stderr


def test_a_signal_after_the_work_ends_the_process_at_once():
    program = (
        "import atexit, signal\nfrom transformer_flax import cli\n"
        "atexit.register(signal.raise_signal, signal.SIGTERM)\ncli.run(lambda: print('done'))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGTERM, "done\n", "")


def test_an_error_promises_no_checkpoint():
    result = subprocess.run([sys.executable, "-c", NOT_A_DIRECTORY], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, "error: Not a directory: README.md/run\n")


def test_too_little_memory_is_told_with_what_needs_less():
    program = "import jax.numpy as jnp\nfrom transformer_flax import cli\ncli.run(lambda: jnp.zeros(1 << 50))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: RESOURCE_EXHAUSTED: ")
    assert "--batch_size" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            BASED.format(module="base", mistake="config.stepz = 3"),
            ": config.stepz is an unknown field; did you mean 's",
        ),
        (BASED.format(module="base", mistake="config.decode.beam = 3"), ": config.decode.beam is an unknown field; di"),
        (BASED.format(module="vectors", mistake="config.vectors.windw = 3"), ": config.vectors.windw is an unknown f"),
        (BASED.format(module="base", mistake="del config.log"), ": config.log is missing"),
        (
            BASED.format(module="base", mistake="config.modle.d_ff = 3"),
            ", line 6: this config has no field 'modle'; did",
        ),
        (
            BASED.format(module="base", mistake="config.model.d_ff = '4'"),
            ", line 6: field 'd_ff' cannot be '4'; it must be a whole number",
        ),
        (
            BASED.format(module="base", mistake="config.model = 3"),
            ", line 6: field 'model' cannot be 3; it must be a section of fields",
        ),
        (
            BASED.format(module="base", mistake="config.lock().stepz = 3"),
            ", line 6: this config has no field 'stepz'; did you mean 'steps'?",
        ),
        (BASED.format(module="base", mistake="1 / 0"), ", line 6: ZeroDivisionError: division by zero"),
        (BASED.format(module="base", mistake="config = 3"), ": get_config returns 3; it must return a ConfigDict"),
        (BASED.format(module="base", mistake="return"), ": get_config returns None; it must return a ConfigDict"),
        (
            BASED.format(module="number", mistake=""),
            ", line 1: ImportError: cannot import name 'number' from 'configs'",
        ),
        (BASED.format(module="base", mistake="config.steps = = 3"), ": SyntaxError: invalid syntax (mine.py, line 6)"),
        ("steps = 3\n", " defines no function get_config; configs/numbers.py shows one"),
        ("def get_config(row):\n    return row\n", ": this config needs an argument behind a colon"),
    ],
)
def test_a_mistake_in_a_config_file_is_one_line_that_names_it(tmp_path, text, message):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        load_config(str(file))
    said = str(refusal.value).removeprefix("--config=")
    assert said.startswith(f"{file}{message}")
    assert "\n" not in said


def test_what_is_tried_behind_a_link_leaves_the_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    require_writable(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "file").exists()


def test_configs_of_the_package_are_found_from_any_directory_and_those_of_the_user_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/table3.py:A-h16").model.num_heads == 16
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/table3.py").write_text(BASED.format(module="base", mistake="config.name = 'mine'"))
    assert load_config("configs/table3.py").name == "mine"


WORKING = """
import signal, time
from transformer_flax import cli


def main():
    try:
        signal.raise_signal(signal.SIGHUP)
        print("going on")
    finally:
        print("cleared away")


cli.run(main)
"""


def test_a_terminal_that_lacks_a_letter_shows_its_number():
    command = [sys.executable, "-c", "from transformer_flax import cli; cli.run(lambda: print('Häuser 你'))"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, cwd=ROOT, env=ascii_only, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "H\\xe4user \\u4f60\n")


def test_a_closed_terminal_ends_a_command_which_clears_away_what_is_half_done():
    command = [sys.executable, "-c", WORKING]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stdout) == (129, "cleared away\n")
    result = subprocess.run(["nohup", *command], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stdout) == (0, "going on\ncleared away\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_its_flags(command):
    told = run(command, "--help")
    assert told.returncode == 0, told.stderr
    flag = {"fetch": "output"}.get(command, "config" if command in ("train", "sweep", "cost", "vectors") else "workdir")
    assert f"  --{flag}:" in told.stdout
    assert command == "translate" or "--nbest" not in told.stdout  # each has its own flags
    assert ("configs/vectors.py explains" in " ".join(told.stdout.split())) == (command == "vectors")


def test_the_exit_status_does_not_depend_on_where_its_message_goes():
    with open("/dev/full", "w") as full, started("translate", stdout=full, stderr=full) as process:
        assert process.wait(PATIENCE) == 2


def test_a_reader_that_has_had_enough_of_the_help_is_no_error():
    reader, pipe = os.pipe()
    os.close(reader)
    with started("align", "--help", stdout=pipe, stderr=subprocess.PIPE) as process:
        os.close(pipe)
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, b"")


@pytest.mark.parametrize(
    "line",
    [
        "evaluate --workdir=no",
        long("classify --workdir=no"),
        "align --workdir=no",
        long("export --workdir=no x"),
        "fetch no",
    ],
)
def test_a_command_starts_from_nothing(line):
    command, *arguments = line.split()
    started = [sys.executable, "-m", f"transformer_flax.{command}", *arguments]
    result = subprocess.run(started, cwd=ROOT, input="", capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_an_error_that_no_code_can_catch_is_shown_but_for_that_of_a_loop_that_orbax_has_closed(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "__unraisablehook__", shown.append)
    errors = ValueError("a defect"), RuntimeError("Event loop is closed")
    defect, closed = (types.SimpleNamespace(exc_type=type(error), exc_value=error) for error in errors)
    for unraisable in (defect, closed):
        _unraisable(unraisable)
    assert shown == [defect]

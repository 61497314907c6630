"""A run that is asked to end: a real process, real signals."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios

import pytest

from tests.commands.process import ENVIRONMENT, PATIENCE, ROOT, wait_for_output
from tests.training.small import write_text
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.metrics import read_lines

CONFIG = """
from tests.training.small import small_config

def get_config():
    return small_config(data__path={text!r}, data__cache_dir={cache!r}, steps=10**6, checkpoint__every=10**5,
                        checkpoint__keep=3, log__every=7, eval__every={eval_every}, decode__max_extra_length=50)
"""


@contextlib.contextmanager
def training(folder, *arguments, eval_every=0, **options):
    """train.py on a small config, as it runs, with other options of Popen; it does not outlive the context."""
    (folder / "text").mkdir(exist_ok=True)
    if not (folder / "text/train.en").exists():
        write_text(folder / "text")
    config = folder / "config.py"
    config.write_text(CONFIG.format(text=str(folder / "text"), cache=str(folder / "cache"), eval_every=eval_every))
    command = [sys.executable, "train.py", f"--config={config}", f"--workdir={folder / 'run'}", *arguments]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, **({"env": env} | pipe | options)) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process, what: str) -> str:
    said = ""
    while what not in said:
        wait_for_output(process.stdout)
        line = process.stdout.readline()
        assert line, f"{what!r} was not said:\n{said}"
        said += line
    return said


def ended(process) -> tuple[int, str]:
    said, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, said


@contextlib.contextmanager
def training_at_a_terminal(folder):
    """The same, with a terminal that shows its bars, and is closed with the process's stdout."""
    terminal, own = pty.openpty()
    options = {
        "stdin": own,
        "stdout": own,
        "stderr": own,
        "env": ENVIRONMENT | {"TERM": "xterm"},
        "start_new_session": True,
        "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY),
    }
    with training(folder, **options) as process:
        os.close(own)
        process.stdout = os.fdopen(terminal, errors="replace")
        yield process


def test_a_signal_ends_a_run_after_its_step_and_no_step_is_lost(tmp_path):
    at = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        with training(tmp_path) as process:
            said = read_until(process, "loss")
            assert not at or f"resuming from step {at:,}" in said
            process.send_signal(number)
            status, said = ended(process)
        assert status == 128 + number
        assert "Traceback" not in said
        stopped = re.search(rf"stopped by {number.name} after step ([\d,]+), which is saved", said)
        assert "the same command resumes from the last checkpoint" in said
        at = int(stopped[1].replace(",", ""))
        assert saved_steps(tmp_path / "run/checkpoints")[-1] == at
    with training_at_a_terminal(tmp_path) as process:
        read_until(process, "loss")
        process.stdout.close()  # it can say nothing more
        assert process.wait(PATIENCE) == 128 + signal.SIGHUP
    assert saved_steps(tmp_path / "run/checkpoints")[-1] > at
    assert len(saved_steps(tmp_path / "run/checkpoints")) == 3  # what an interruption saves evicts nothing
    logged = [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert logged == [7 * (i + 1) for i in range(len(logged))]


def test_a_run_that_is_interrupted_while_it_is_evaluated_is_evaluated_when_it_goes_on(tmp_path):
    with training(tmp_path, eval_every=20) as process:
        read_until(process, "evaluating the parameters of step 20")
        process.send_signal(signal.SIGTERM)
        status, said = ended(process)
    assert status == 128 + signal.SIGTERM
    if "stopped by SIGTERM while evaluating step 20, which is saved" in said:  # else it was done with it by then
        assert "valid/bleu" not in read_lines(tmp_path / "run/metrics.jsonl")[-1]
    with training(tmp_path, "--config.steps=41", eval_every=20) as process:
        status, said = ended(process)
    assert status == 0
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines if "valid/bleu" in line] == [20, 40, 41]


def test_a_signal_while_the_text_is_prepared_leaves_nothing_behind(tmp_path):
    with training(tmp_path, "--config.data.vocab_size=2000") as process:
        read_until(process, "training the tokenizer")
        process.send_signal(signal.SIGTERM)
        status, said = ended(process)
    assert status == 128 + signal.SIGTERM
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("*partial*"))


SIGNALLED = """
import os, sys
from transformer_flax.training.interruption import Interruption

with Interruption() as interruption:
    for number in sys.argv[1:]:
        os.kill(os.getpid(), int(number))
    print(interruption.signal and interruption.signal.name)
"""


def signalled(*numbers, by=()) -> subprocess.CompletedProcess:
    """A program that sends itself signals, and says which it remembers."""
    command = [*by, sys.executable, "-c", SIGNALLED, *(str(int(number)) for number in numbers)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_is_repeated_is_the_same_request(number):
    result = signalled(number, signal.SIGTERM, number)
    assert (result.returncode, result.stdout) == (0, f"{number.name}\n")
    assert result.stderr.count("ending where nothing is lost; Ctrl-C ends at once") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_ends_at_once_what_was_asked_to_end(number):
    result = signalled(number, signal.SIGINT)
    assert (result.returncode, result.stdout) == (-signal.SIGINT, "")


def test_a_signal_that_is_ignored_stays_so():
    assert signalled(signal.SIGHUP, by=["nohup"]).stdout == "None\n"
    assert signalled(signal.SIGHUP, signal.SIGTERM, by=["nohup"]).stdout == "SIGTERM\n"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own."""
    disk = tmp_path / "run"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk) -> None:
    with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


OFTEN = ("--config.checkpoint.every=20", "--config.log.every=20")


def test_a_run_goes_on_without_a_disk_if_it_may(tmp_path, small_disk):
    with training(tmp_path, *OFTEN, "--config.on_write_failure=go on") as process:
        read_until(process, "step      40")
        fill(small_disk)
        said = read_until(process, "the run continues without it")
        assert "a checkpoint" in said or "metrics.jsonl" in said
        os.remove(small_disk / "other")
        whole = saved_steps(small_disk / "checkpoints")
        while saved_steps(small_disk / "checkpoints") == whole:  # there is room for the next one
            read_until(process, "loss")
        process.send_signal(signal.SIGTERM)
        status, said = ended(process)
    assert status == 128 + signal.SIGTERM
    assert all("step" in line for line in read_lines(small_disk / "metrics.jsonl"))


def test_a_run_ends_on_a_full_disk_and_goes_on_when_there_is_room(tmp_path, small_disk):
    with training(tmp_path, *OFTEN) as process:
        read_until(process, "step      40")
        fill(small_disk)
        status, said = ended(process)
    assert status == 2
    assert "error: " in said
    assert "Traceback" not in said
    os.remove(small_disk / "other")
    last = saved_steps(small_disk / "checkpoints")[-1]
    with training(tmp_path, *OFTEN) as process:
        said = read_until(process, "loss")
        assert f"resuming from step {last:,}" in said
        process.kill()

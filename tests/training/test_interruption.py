"""A run that is asked to end: a real process, real signals."""

import concurrent.futures
import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.commands.process import ENVIRONMENT, PATIENCE, ROOT, wait_for_output
from tests.disks import mounted
from tests.forked import Forked
from tests.training.small import write_text
from transformer_flax.files import read_json_lines
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.interruption import SIGNALS, Interruption

CONFIG = """
from tests.training.small import small_config

def get_config():
    return small_config(data__path={text!r}, data__cache_dir={cache!r}, steps=10**6, checkpoint__every=10**5,
                        checkpoint__keep=1, log__every=7, eval__every={eval_every}, decode__max_extra_length=50)
"""


def arguments(folder, *more, eval_every=0) -> list[str]:
    """Returns train.py's arguments for a small config, which is written to the folder."""
    (folder / "text").mkdir(exist_ok=True)
    if not (folder / "text/train.en").exists():
        write_text(folder / "text")
    config = folder / "config.py"
    config.write_text(CONFIG.format(text=str(folder / "text"), cache=str(folder / "cache"), eval_every=eval_every))
    return [f"--config={config}", f"--workdir={folder / 'run'}", *more]


def training(folder, *more, eval_every=0) -> Forked:
    """train.py as it runs; a context."""
    return Forked("train.py", *arguments(folder, *more, eval_every=eval_every), PYTHONUNBUFFERED="1")


def ended(process: Forked) -> tuple[int, str]:
    process.wait()
    return process.status, process.said


@contextlib.contextmanager
def training_at_a_terminal(folder):
    """A process of its own, with a terminal that shows its bars; yields both. It does not outlive the context."""
    terminal, own = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), own)
    # The terminal is that of its session, whose end is told to its processes.
    command = ["setsid", "--ctty", sys.executable, "train.py", *arguments(folder)]
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": "1", "TERM": "xterm"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **streams) as process:
        os.close(own)
        try:
            yield process, terminal
        finally:
            process.kill()


def test_a_signal_ends_a_run_after_its_step_and_no_step_is_lost(tmp_path):
    with training(tmp_path) as process:
        process.wait_for("loss")
        process.send_signal(signal.SIGINT)
        status, told = ended(process)
    assert status == 128 + signal.SIGINT
    assert "Traceback" not in told
    stopped = re.search(r"stopped by SIGINT after step ([\d,]+), which is saved", told)
    assert "the same command resumes from the last checkpoint" in told
    at = int(stopped[1].replace(",", ""))
    assert saved_steps(tmp_path / "run/checkpoints") == [at]
    with training_at_a_terminal(tmp_path) as (process, terminal):
        shown = b""
        while b"loss" not in shown:
            wait_for_output(terminal)
            shown += os.read(terminal, 1 << 16)
        assert f"resuming from step {at:,}" in shown.decode(errors="ignore")
        os.close(terminal)  # it can say nothing more
        assert process.wait(PATIENCE) == 128 + signal.SIGHUP
    first, last = saved_steps(tmp_path / "run/checkpoints")  # what an interruption saves evicts nothing
    assert first == at < last
    logged = [line["step"] for line in read_json_lines(tmp_path / "run/metrics.jsonl")]
    assert logged == [7 * (i + 1) for i in range(len(logged))]


def test_a_run_that_is_interrupted_while_it_is_evaluated_is_evaluated_when_it_goes_on(tmp_path):
    slow = "--config.decode.batch_size=1", "--config.decode.beam_size=8", "--config.decode.max_extra_length=1000"
    with training(tmp_path, *slow, eval_every=20) as process:
        process.wait_for("evaluating the parameters of step 20")
        process.send_signal(signal.SIGTERM)
        status, told = ended(process)
    assert status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM while evaluating step 20, which is saved" in told
    assert "valid/bleu" not in read_json_lines(tmp_path / "run/metrics.jsonl")[-1]
    with training(tmp_path, "--config.steps=41", eval_every=20) as process:
        status, told = ended(process)
    assert status == 0, told
    lines = read_json_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines if "valid/bleu" in line] == [20, 40, 41]


def test_a_signal_while_the_text_is_prepared_leaves_nothing_behind(tmp_path):
    with training(tmp_path, "--config.data.vocab_size=2000") as process:
        process.wait_for("training the tokenizer")
        process.send_signal(signal.SIGTERM)
        status, told = ended(process)
    assert status == 128 + signal.SIGTERM
    assert "Traceback" not in told
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


def test_after_a_run_signals_are_what_they_were_and_a_run_in_another_thread_changes_none():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signal == signal.SIGTERM
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert not pool.submit(Interruption().__enter__).result().asked
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "run", "8m") as disk:
        yield disk


def fill(disk) -> None:
    with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


OFTEN = ("--config.checkpoint.every=20", "--config.log.every=20")


def test_a_run_ends_on_a_full_disk_goes_on_when_there_is_room_and_without_a_disk_if_it_may(tmp_path, small_disk):
    with training(tmp_path, *OFTEN) as process:
        process.wait_for("step      40")
        fill(small_disk)
        status, told = ended(process)
    assert status == 2
    assert "error: " in told
    assert "Traceback" not in told
    os.remove(small_disk / "other")
    last = saved_steps(small_disk / "checkpoints")[-1]
    with training(tmp_path, *OFTEN, "--config.on_write_failure=go on") as process:
        assert f"resuming from step {last:,}" in process.wait_for("loss")
        fill(small_disk)
        told = process.wait_for("the run continues without it")
        assert "a checkpoint" in told or "metrics.jsonl" in told
        os.remove(small_disk / "other")
        whole, deadline = saved_steps(small_disk / "checkpoints"), time.monotonic() + PATIENCE
        while saved_steps(small_disk / "checkpoints") == whole:  # there is room for the next one
            assert time.monotonic() < deadline, process.said
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        status, _ = ended(process)
    assert status == 128 + signal.SIGTERM
    assert all("step" in line for line in read_json_lines(small_disk / "metrics.jsonl"))


@pytest.mark.long
def test_a_run_that_may_go_on_without_a_checkpoint_is_saved_where_a_signal_ends_its_evaluation(tmp_path, small_disk):
    slow = "--config.decode.batch_size=1", "--config.decode.beam_size=8", "--config.decode.max_extra_length=1000"
    with training(tmp_path, *slow, "--config.on_write_failure=go on", eval_every=200) as process:
        process.wait_for("loss")
        fill(small_disk)
        told = process.wait_for("evaluating the parameters of step 200")
        assert "a checkpoint" in told
        assert not saved_steps(small_disk / "checkpoints")
        os.remove(small_disk / "other")
        process.send_signal(signal.SIGTERM)
        status, told = ended(process)
    assert status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM while evaluating step 200, which is saved" in told
    assert saved_steps(small_disk / "checkpoints") == [200]

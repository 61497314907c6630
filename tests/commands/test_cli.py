import subprocess
import sys

from tests.conftest import ROOT

INTERRUPTED_WHILE_COLLECTING = """
import gc, signal, time
from transformer_flax import cli


def main():
    def collecting(phase, info):
        gc.callbacks.remove(collecting)
        signal.raise_signal(signal.SIGINT)  # what it raises, nobody can catch here

    gc.callbacks.append(collecting)
    gc.collect()
    time.sleep(60)


cli.run(main)
"""


def test_an_interruption_is_not_lost_to_the_garbage_collector():
    command = [sys.executable, "-c", INTERRUPTED_WHILE_COLLECTING]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert result.returncode == 130
    assert result.stderr.splitlines()[-1] == "interrupted"

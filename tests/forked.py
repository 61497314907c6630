"""Programs run by processes that are forked from one that has imported everything: each starts seconds earlier."""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time

from tests.conftest import ROOT

PATIENCE = 120  # seconds, after which a test fails

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.preloaded"])


class Forked:
    """A program of the clone as it runs: `python -m module`, `python file.py` or `python -c code`. A context.

    Args:
      program: the module, the file.py or "-c".
      arguments: of its command line.
      given: its standard input.
      environment: variables beside the tests' own.
    """

    def __init__(self, program: str, *arguments, given: bytes = b"", **environment: str):
        self._line, self._folder = [program, *map(str, arguments)], tempfile.TemporaryDirectory()
        self._streams = [pathlib.Path(self._folder.name, name) for name in ("in", "out", "err")]
        for stream, content in zip(self._streams, (given, b"", b""), strict=True):
            stream.write_bytes(content)
        self._process = PROCESSES.Process(target=_main, args=(self._line, self._streams, environment))
        self._process.start()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    @property
    def out(self) -> str:
        """Returns its standard output so far."""
        return self._streams[1].read_bytes().decode(errors="ignore")  # a character may not be whole yet

    @property
    def err(self) -> str:
        """The same of its standard error."""
        return self._streams[2].read_bytes().decode(errors="ignore")

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.exitcode

    @property
    def said(self) -> str:
        """All that it has put out so far."""
        return self.out + self.err

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_for(self, text: str) -> str:
        """Waits until it has put out a text; returns all that it has put out."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.said:
            over = self.status is not None or time.monotonic() > deadline
            assert not over or text in self.said, f"{self._line} has not said {text!r}:\n{self.said}"
            time.sleep(0.01)
        return self.said

    def wait(self, seconds: float = PATIENCE) -> None:
        """Waits until it has ended."""
        self._process.join(seconds)
        assert self.status is not None, f"{self._line} has not ended in {seconds:.0f} seconds\n{self.out}{self.err}"


def run(program: str, *arguments, **more) -> subprocess.CompletedProcess:
    """The program run to its end; the arguments are those of `Forked`."""
    with Forked(program, *arguments, **more) as process:
        process.wait()
        return subprocess.CompletedProcess([program, *arguments], process.status, process.out, process.err)


def _main(line: list[str], streams: list[pathlib.Path], environment: dict[str, str]) -> None:
    for number, stream in enumerate(streams):
        opened = os.open(stream, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (multiprocessing has put another in its place)
    os.chdir(ROOT)
    os.environ |= environment
    if devices := environment.get("JAX_NUM_CPU_DEVICES"):
        import jax

        jax.config.update("jax_num_cpu_devices", int(devices))  # which has read the variable already
    if line[0] == "-c":
        sys.argv = ["-c", *line[2:]]
        exec(line[1], {"__name__": "__main__"})
    elif line[0].endswith(".py"):
        sys.argv = line
        runpy.run_path(line[0], run_name="__main__")
    else:
        sys.argv = line
        runpy.run_module(line[0], run_name="__main__", alter_sys=True)

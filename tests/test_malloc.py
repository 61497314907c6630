"""malloc keeps memory and uses huge pages where a model is trained on a CPU, unless the user says otherwise."""

import json
import os
import pathlib
import platform
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# How many page faults it takes to write to 16 MB that were just given back, eight times over.
PROGRAM = """
import ctypes, json, resource
{begin}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def write():
    block = libc.malloc(ctypes.c_size_t(1 << 24))
    ctypes.memset(block, 1, 1 << 24)
    libc.free(ctypes.c_void_p(block))
write()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    write()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
huge = sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages"))
print(json.dumps([faults, huge]))
"""
TRAINING = """
from configs.numbers import get_config
from transformer_flax.training.setup import checked_config
checked_config(get_config())
"""
A_TOKENIZER = """
from configs.numbers import get_config
from transformer_flax.training.setup import checked_config
config = get_config()
config.data.update(tokenizer_file="tests/data/run_0.1/tokenizer.json", vocab_size=300)
checked_config(config)
"""
ARENAS = """
import ctypes
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
stdout = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, stdout)  # describes each arena as a <heap>
libc.fclose(stdout)
"""
KEEPING = "from transformer_flax.malloc import keep_memory; keep_memory()"


def measure(begin: str = TRAINING, **environment: str) -> tuple[int, int]:
    """Page faults of the program, and its kB in huge pages, with nothing of malloc's set but this."""
    return tuple(json.loads(output_of(PROGRAM.replace("{begin}", begin), **environment)))


def output_of(program: str, **environment: str) -> str:
    """What a program prints, with nothing of malloc's set but this."""
    ours = ("MALLOC_", "GLIBC_", "TRANSFORMER_FLAX_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is set where it is glibc's")


def test_memory_that_was_freed_is_given_again_without_page_faults():
    faults, huge = measure()
    assert faults < 100
    enabled = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()  # always [madvise] never
    if "[never]" not in enabled:
        assert huge >= 1 << 13


@pytest.mark.parametrize("begin", [TRAINING, A_TOKENIZER], ids=["a new tokenizer", "one that was read"])
def test_all_threads_have_one_arena(begin):
    assert output_of(begin + ARENAS).count("<heap nr=") == 1


@pytest.mark.parametrize(
    "choice",
    [
        {"begin": KEEPING, "TRANSFORMER_FLAX_ALLOCATOR": "system"},
        {"begin": KEEPING, "MALLOC_TOP_PAD_": "0"},
        {"begin": KEEPING, "GLIBC_TUNABLES": "glibc.malloc.top_pad=0"},
        {"begin": KEEPING, "JAX_PLATFORMS": "cuda,cpu"},
        {"begin": ""},
    ],
    ids=["the switch", "malloc's own variables", "glibc's tunables", "an accelerator", "no training"],
)
def test_the_allocator_is_left_as_it_is(choice):
    faults, _ = measure(**choice)
    assert faults >= 8 * (1 << 24) // (1 << 16)  # pages of 64 KB, at least

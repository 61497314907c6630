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
KEEPING = "from transformer_flax.allocator import keep_memory; keep_memory()"


def measure(begin: str = TRAINING, **environment: str) -> tuple[int, int]:
    """Page faults of the program, and its kB in huge pages, with nothing of malloc's set but this."""
    ours = ("MALLOC_", "GLIBC_", "TRANSFORMER_FLAX_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{begin}", begin)],
        env=clean | {"JAX_PLATFORMS": "cpu"} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(json.loads(result.stdout))


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is set where it is glibc's")


def test_memory_that_was_freed_is_given_again_without_page_faults():
    faults, huge = measure()
    assert faults < 100
    enabled = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()  # always [madvise] never
    if "[never]" not in enabled:
        assert huge >= 1 << 13


@pytest.mark.parametrize(
    "choice",
    [
        {"begin": KEEPING, "TRANSFORMER_FLAX_ALLOCATOR": "system"},
        {"begin": KEEPING, "MALLOC_TOP_PAD_": "0"},
        {"begin": KEEPING, "JAX_PLATFORMS": "cuda,cpu"},
        {"begin": ""},
    ],
    ids=["the switch", "malloc's own variables", "an accelerator", "no training"],
)
def test_the_allocator_is_left_as_it_is(choice):
    faults, _ = measure(**choice)
    assert faults >= 8 * (1 << 24) // (1 << 16)  # pages of 64 KB, at least

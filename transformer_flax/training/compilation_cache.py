"""Keeps compiled programs for the next process."""

import contextlib
import os
import pathlib
import sys
import zlib
from collections.abc import Callable

import jax

from transformer_flax.files import cache_root
from transformer_flax.training.multihost import share

# How to decompress a program, and the error for one that is cut short, by the first byte: that of zlib's or zstd's
# format. JAX uses zstd where Python has it.
FORMATS: dict[bytes, tuple[Callable[..., bytes], type[Exception]]] = {b"\x78": (zlib.decompress, zlib.error)}
if sys.version_info >= (3, 14):
    from compression import zstd

    FORMATS[b"\x28"] = zstd.decompress, zstd.ZstdError


def keep_compiled(cache_dir: str) -> pathlib.Path:
    """Enables JAX's compilation cache and returns its directory. An existing setting wins.

    The cache lies in `cache_dir`, the directory of caches; "" is the default directory.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        # A program for one CPU may use instructions that another CPU lacks. Machines may share a home directory.
        cpuinfo = pathlib.Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines(keepends=True) if cpuinfo.exists() else []
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")  # as x86 and ARM say
        machine = f"{os.uname().machine}-{zlib.crc32(features.encode()):08x}"
        jax.config.update("jax_compilation_cache_dir", str(cache_root(cache_dir) / "compiled" / machine))
    folder = pathlib.Path(str(jax.config.values["jax_compilation_cache_dir"]))
    _remove_cut_short(folder)
    if share()[1] > 1 and jax.default_backend() == "cpu":
        # Only the first process would find its programs. At the first step it would wait for the others, which compile,
        # and Gloo gives up after 30 seconds.
        jax.config.update("jax_enable_compilation_cache", False)
    return folder


def _remove_cut_short(folder: pathlib.Path) -> None:
    """Removes incomplete compiled programs, which a kill or a full disk has cut short.

    JAX never replaces an incomplete program: it would warn and compile again at each start. Only files that were
    written since the last check are checked. Before Python 3.14, only empty files of zstd's format are detected.
    """
    looked = folder / ".looked"
    with contextlib.suppress(OSError):  # the folder is missing or read-only, or another process was faster
        since = looked.stat().st_mtime_ns if looked.exists() else 0
        looked.touch()
        for file in folder.glob("*-cache"):
            if file.stat().st_mtime_ns >= since and _is_cut_short(file.read_bytes()):
                file.unlink(missing_ok=True)


def _is_cut_short(content: bytes) -> bool:
    if content[:1] not in FORMATS:
        return not content
    decompress, cut_short = FORMATS[content[:1]]
    try:
        decompress(content)
    except cut_short:
        return True
    return False

"""Keeps compiled programs for the next process."""

import contextlib
import os
import pathlib
import zlib

import jax

from transformer_flax.files import cache_root


def keep_compiled(cache_dir: str) -> pathlib.Path:
    """Enables JAX's compilation cache and returns its directory. An existing setting wins.

    Args:
      cache_dir: where caches lie; empty for the usual place.
    """
    given = jax.config.values["jax_compilation_cache_dir"]
    if not given:
        # A program for a CPU may use instructions that another one lacks, and homes are shared by machines.
        cpuinfo = pathlib.Path("/proc/cpuinfo")
        features = next((line for line in cpuinfo.open() if line.startswith("flags")), "") if cpuinfo.exists() else ""
        machine = f"{os.uname().machine}-{zlib.crc32(features.encode()):08x}"
        given = str(cache_root(cache_dir) / "compiled" / machine)
        jax.config.update("jax_compilation_cache_dir", given)
    _remove_cut_short(pathlib.Path(str(given)))
    return pathlib.Path(str(given))


def _remove_cut_short(folder: pathlib.Path) -> None:
    """Removes compiled programs whose writing was cut short, by a kill or a full disk.

    JAX never replaces one: it would warn of it and compile anew at each start. Only what was written since the last
    look is looked at. Of programs that are compressed with zstd, which JAX takes where Python has it, only empty ones
    are found.
    """
    looked = folder / ".looked"
    with contextlib.suppress(OSError):  # no folder yet, one that cannot be written, or another process is faster
        since = looked.stat().st_mtime_ns if looked.exists() else 0
        looked.touch()
        for file in folder.glob("*-cache"):
            if file.stat().st_mtime_ns >= since and _is_cut_short(file.read_bytes()):
                file.unlink(missing_ok=True)


def _is_cut_short(content: bytes) -> bool:
    if content[:1] not in (b"", b"\x78"):  # with which zlib begins
        return False
    try:
        zlib.decompress(content)
    except zlib.error:
        return True
    return False

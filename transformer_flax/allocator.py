"""glibc's allocator, set for training on a CPU: XLA asks it for the buffers of every step and gives them back.

By default each large buffer is a mapping of its own: fresh pages of 4 KB, every one of which costs a page fault and an
entry of the TLB. A small training step then waits for memory more than for arithmetic (docs/performance.md).

Only training sets it. All threads then share one arena, so tokenising takes three times as long and compiling 1.3
times; the search gains nothing.
"""

import ctypes
import importlib.util
import os
import platform

SWITCH = "TRANSFORMER_FLAX_ALLOCATOR"  # set to "system" to leave the allocator as it is

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8  # names of malloc.h
HUGE_PAGES = 14  # MADV_HUGEPAGE of sys/mman.h
ACCELERATORS = ("jax_plugins", "libtpu")  # packages by which JAX finds one


def keep_memory() -> bool:
    """Makes malloc keep freed memory, in one arena and, where the system allows, in huge pages.

    It must come before the first use of a device: threads that exist keep their arenas. It leaves the allocator as it
    is if the libc is not glibc, if JAX may find an accelerator, or if the user has set variables of malloc or
    TRANSFORMER_FLAX_ALLOCATOR=system.

    Returns:
      Whether it did so.
    """
    if platform.libc_ver()[0] != "glibc" or _is_users_choice() or not _is_for_cpu():
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    for option, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (TOP_PAD, 1 << 28), (ARENA_MAX, 1)):
        libc.mallopt(option, value)
    # Only memory that is there can be advised: the heap is extended once, untouched, which costs addresses alone.
    page = os.sysconf("SC_PAGE_SIZE")
    size = page * os.sysconf("SC_PHYS_PAGES") // 2
    heap = libc.malloc(ctypes.c_size_t(size))
    if heap:
        begin = -(-heap // page) * page
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t((heap + size - begin) // page * page), HUGE_PAGES)
        libc.free(ctypes.c_void_p(heap))
    return True


def _is_users_choice() -> bool:
    return (
        os.environ.get(SWITCH) == "system"
        or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
        or any(name.startswith("MALLOC_") for name in os.environ)
    )


def _is_for_cpu() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return platforms == "cpu" if platforms else not any(map(importlib.util.find_spec, ACCELERATORS))

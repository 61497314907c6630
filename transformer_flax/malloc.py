"""Sets glibc's allocator for training on a CPU, where XLA allocates and frees the buffers of every step.

By default, each large buffer is a separate mapping of fresh pages of 4 KB. Each page costs a page fault and an entry of
the TLB. A small training step then waits more for memory than for arithmetic (docs/performance.md).

Only training sets the allocator, because all threads then share one arena: tokenising takes 2.8 times as long, and
compiling 1.3 times as long. A run does each once, and both are cached. The search gains nothing.
"""

import ctypes
import importlib.util
import os
import platform

SWITCH = "TRANSFORMER_FLAX_ALLOCATOR"  # set to "system" to leave the allocator as it is

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8  # names of malloc.h
HUGE_PAGES = 14  # MADV_HUGEPAGE of sys/mman.h
ACCELERATORS = ("jax_plugins", "libtpu")  # packages by which JAX finds an accelerator


def keep_memory() -> None:
    """Makes malloc keep freed memory, in one arena and, if the system allows it, in huge pages.

    Must be called before the first use of a device, because existing threads keep their arenas. Leaves the allocator
    unchanged if the libc is not glibc, if JAX may find an accelerator, or if the user has set malloc's environment
    variables or TRANSFORMER_FLAX_ALLOCATOR=system.
    """
    platforms, tunables = os.environ.get("JAX_PLATFORMS"), os.environ.get("GLIBC_TUNABLES", "")
    is_for_cpu = platforms == "cpu" if platforms else not any(map(importlib.util.find_spec, ACCELERATORS))
    is_set = "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)
    if platform.libc_ver()[0] != "glibc" or not is_for_cpu or is_set or os.environ.get(SWITCH) == "system":
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    for option, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (TOP_PAD, 1 << 28), (ARENA_MAX, 1)):
        libc.mallopt(option, value)
    # madvise needs memory that exists. So the heap is extended once, untouched, which costs only addresses.
    page = os.sysconf("SC_PAGE_SIZE")
    size = page * os.sysconf("SC_PHYS_PAGES") // 2
    heap = libc.malloc(ctypes.c_size_t(size))
    if heap:
        begin = -(-heap // page) * page
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t((heap + size - begin) // page * page), HUGE_PAGES)
        libc.free(ctypes.c_void_p(heap))

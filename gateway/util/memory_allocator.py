"""Settings of the C memory allocator (malloc), which return freed memory to the operating system.

Without them, the allocator keeps the pages of freed request bodies. All functions need glibc, and
do nothing with another C library.
"""

from __future__ import annotations

import ctypes

# Bytes: the allocator maps larger blocks on their own, and keeps this much free memory at most. A
# mapped block costs a page fault per 4 KiB, which is a tenth of a request with a body of 400 kB.
MMAP_THRESHOLD, TRIM_THRESHOLD = 1024 * 1024, 4 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def return_large_blocks() -> None:
    """Make the allocator return the memory of a large body as soon as it is freed.

    By default, glibc raises its thresholds when a large block is freed, and then keeps up to 64 MiB
    of free memory.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)


def return_free_pages() -> None:
    """Return the allocator's free pages to the operating system now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""Sealed memory files (memfd): only their creator can write to them, and their size is fixed."""

from __future__ import annotations

import fcntl
import mmap
import os

_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; the fcntl module has it from Python 3.13 on
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE


def create_sealed_file(name: str, size: int, *, populate: bool = False) -> tuple[int, mmap.mmap]:
    """Create a zeroed memory file of `size` bytes to which only this process can write.

    Returns its descriptor and its mapping. Only this mapping can write to the file. With
    `populate`, all pages are mapped now, which saves page faults later.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        memory = mmap.mmap(fd, size, flags=flags)
        # Seal after mapping: later mappings cannot write.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, memory

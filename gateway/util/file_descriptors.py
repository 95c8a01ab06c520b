"""Raises the process's limit of open files, for tens of thousands of sockets."""

from __future__ import annotations

import fcntl
import os
import resource
from contextlib import suppress

DESCRIPTORS = 65536
"""Number of file descriptors to prepare for. The kernel's table for them takes half a megabyte."""


def reserve_descriptors(number: int = DESCRIPTORS) -> int:
    """Prepare for `number` open files, as far as the hard limit allows; return for how many.

    The soft limit on open files is raised, which is 1,024 in many shells.

    The kernel's table of open files grows too. Otherwise it would double whenever it is full. In a
    process with threads, each doubling waits for the other threads (synchronize_rcu() of Linux): an
    accept() took 13 ms, and the event loop with it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        number = min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < number:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
        except (ValueError, OSError):
            number = soft
    with suppress(OSError), open(os.devnull, "rb") as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, number - 1))
    return number

"""Raises the process's limit of open files, for tens of thousands of sockets."""

from __future__ import annotations

import fcntl
import os
import resource
from contextlib import suppress

DESCRIPTORS = 65536
"""Number of file descriptors to prepare for. The kernel's table for them takes half a megabyte."""


def reserve_descriptors(number: int = DESCRIPTORS) -> int:
    """Raise the soft limit on open files to `number`, or to the hard limit if that is lower.

    Returns the new limit. The kernel's table of open files is enlarged at once. Otherwise Linux
    would double the table whenever it is full, and a doubling stops the event loop of a process
    with threads for milliseconds.
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

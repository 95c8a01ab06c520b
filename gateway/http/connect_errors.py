"""Distinguishes failures to connect that this process causes from those that an engine causes."""

from __future__ import annotations

import errno
import socket

# Reasons of a failed connect that say nothing about the engine: descriptors, memory, ports, rights.
LOCAL_ERRORS = frozenset(
    {
        errno.EACCES,
        errno.EADDRNOTAVAIL,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EPERM,
    }
)


def is_local_error(error: OSError) -> bool:
    """Return whether a failed connect was caused by this process or by name resolution.

    Such a failure does not show that the engine has a problem.
    """
    return isinstance(error, socket.gaierror) or error.errno in LOCAL_ERRORS

"""Tells failures to connect that are due to this process from those that are due to an engine."""

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
    """Return whether a failed connect is due to this process or to name resolution.

    Such a failure says nothing about the engine.
    """
    return isinstance(error, socket.gaierror) or error.errno in LOCAL_ERRORS

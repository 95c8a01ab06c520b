"""Distinguishes failures to connect that this process causes from those that an engine causes."""

from __future__ import annotations

import errno
import socket

from gateway.protocol.upstream_error import LOCAL_ERROR

# Reasons of a failed connect that say nothing about the engine. Without descriptors or memory, no
# engine can be reached. The others may last, and concern one engine: no route by IPv6, a firewall.
EXHAUSTION = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
LOCAL_ERRORS = EXHAUSTION | {errno.EACCES, errno.EADDRNOTAVAIL, errno.EAGAIN, errno.EPERM}


def is_process_error(error: OSError) -> bool:
    """Return whether a connect failed because this process lacks descriptors or memory."""
    return not isinstance(error, socket.gaierror) and error.errno in EXHAUSTION


def is_local_error(error: OSError) -> bool:
    """Return whether a failed connect was caused by this process or by name resolution.

    Such a failure does not show that the engine has a problem.
    """
    return isinstance(error, socket.gaierror) or error.errno in LOCAL_ERRORS


def connect_error_kind(error: OSError) -> str:
    """Return the kind of failure of a request whose connection to an engine failed."""
    if is_process_error(error):
        return LOCAL_ERROR
    return "connect_error" if is_local_error(error) else "connect_failed"

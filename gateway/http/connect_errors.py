"""Tells whether a failure to connect was caused by this process or by the engine."""

from __future__ import annotations

import errno
import socket

from gateway.protocol.upstream_error import LOCAL_ERROR

# Reasons of a failed connect that say nothing about the engine. Without descriptors or memory, no
# engine can be reached. The others may last, and concern one engine: no route by IPv6, a firewall.
EXHAUSTION = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
LOCAL_ERRORS = EXHAUSTION | {errno.EACCES, errno.EADDRNOTAVAIL, errno.EAGAIN, errno.EPERM}

NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class NoFreePortError(OSError):
    """Raised when all local ports are in use by connections to the same address."""

    def __init__(self) -> None:
        super().__init__(errno.EADDRNOTAVAIL, "no local port is free for another connection to it")


def lacks_port(error: OSError, host: str, port: int) -> bool:
    """Return whether a connect to an IP address failed because no local port was free.

    The result is False if the cause is that no address of this machine can reach `host`.
    """
    if error.errno != errno.EADDRNOTAVAIL:
        return False
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=NUMERIC)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as datagrams:
            # This chooses the machine's own address as TCP does, and sends nothing.
            datagrams.connect(found[0][4])
    except OSError:
        return False
    return True


def is_process_error(error: OSError) -> bool:
    """Return whether a connect failed because descriptors, memory or local ports ran out."""
    if isinstance(error, socket.gaierror):
        return False
    return error.errno in EXHAUSTION or isinstance(error, NoFreePortError)


def is_local_error(error: OSError) -> bool:
    """Return whether a failed connect was caused by this process or by name resolution.

    Such a failure does not show that the engine has a problem.
    """
    return isinstance(error, socket.gaierror) or error.errno in LOCAL_ERRORS


def connect_error_kind(error: OSError) -> str:
    """Return the kind of UpstreamError to raise when a connection to an engine failed."""
    if is_process_error(error):
        return LOCAL_ERROR
    return "connect_error" if is_local_error(error) else "connect_failed"

"""Addresses: whether a port is free, which key asked for it, and how a host and a port are written as a URL.

The first is asked before anything is started, so that the answer can name the port and the flag to change it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager


def is_free(host: str, port: int) -> bool:
    """Whether nobody else listens on `host`:`port` now.

    Port 0 is always free; a host that does not resolve or is not this machine's counts as free, and so does a port that
    this user may not take, because the listener will say so better.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except OSError:
        return True
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:  # what is wrong besides the listener says better
            return error.errno != errno.EADDRINUSE
        return True


@contextmanager
def named(key: str, host: str, port: int) -> Iterator[None]:
    """Where `host`:`port` cannot be listened on, the OSError says which key of the configuration asked for it."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{key}, {http_url(host, port)}: {error.strerror or error}") from error


def http_url(host: str, port: int, *, encrypted: bool = False) -> str:
    """http://host:port or https://host:port, an IPv6 address in brackets."""
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

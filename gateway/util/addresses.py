"""Helpers for addresses: whether a port is free, errors of listeners, and URLs from a host and a
port.

A command checks its port before it starts anything, so that its error can name the option to
change.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager


def is_port_free(host: str, port: int) -> bool:
    """Return whether no process is listening on `host`:`port` now.

    Port 0 is always free. So is a port that cannot be listened on for another reason, such as an
    unknown host or missing rights: the listener's own error explains that better.
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
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True


@contextmanager
def naming_config_key(key: str, host: str, port: int) -> Iterator[None]:
    """Prefix an OSError raised in the `with` block with the configuration key and the URL of the
    listener.
    """
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot listen on {key}, {http_url(host, port)}: {error.strerror or error}"
        ) from error


def http_url(host: str, port: int, *, encrypted: bool = False) -> str:
    """Return http://host:port or https://host:port, as text, with brackets around an IPv6
    address.
    """
    scheme = "https" if encrypted else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

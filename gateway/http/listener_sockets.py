"""Listening sockets: opened by this process, or inherited from systemd or the previous process."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import MappingProxyType

from gateway.util.urls import http_url

BACKLOG = 4096
FIRST_FD = 3  # sd_listen_fds(3)
API, ADMIN = "api", "admin"
LISTENER_NAMES = (API, ADMIN)
ADMIN_RECEIVE_BUFFER = 256 * 1024  # bytes of an admin connection's receive buffer in the kernel

SocketsByName = Mapping[str, tuple[socket.socket, ...]]
"""The listening sockets of a process, by the name of their listener."""

NO_SOCKETS: SocketsByName = MappingProxyType({})


class ActivationError(Exception):
    """Raised when sockets passed by systemd cannot be used. The message says what to change."""


def is_port_free(host: str, port: int) -> bool:
    """Return whether no process is listening on `host`:`port` now.

    A command checks its port before it starts anything, so that its error can name the option to
    change. Port 0 is always free.

    The result is also True if the port cannot be used for another reason, such as an unknown
    host: the listener's own error explains that better.
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
    """Prefix an OSError in the `with` block with the listener's configuration key and URL."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot listen on {key}, {http_url(host, port)}: {error.strerror or error}"
        ) from error


def bind(host: str, port: int, *, reuse_port: bool = False) -> tuple[socket.socket, ...]:
    """Open a listening TCP socket on every address of `host`, and return the sockets.

    With port 0, all of them get the same free port. Raises OSError.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            if not port and bound:
                address = (address[0], bound[0].getsockname()[1], *address[2:])
            listener = socket.socket(family, kind, protocol)
            bound.append(listener)
            _listen(listener, address, reuse_port)
    except OSError:
        for listener in bound:
            listener.close()
        raise
    return tuple(bound)


def _listen(listener: socket.socket, address: tuple[object, ...], reuse_port: bool) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.setblocking(False)
    listener.bind(address)
    listener.listen(BACKLOG)


def limit_send_buffers(listening: Iterable[socket.socket], memory_bytes: int) -> None:
    """Limit each accepted connection to `memory_bytes` of kernel memory for unacknowledged bytes.

    Without a limit, the kernel keeps up to 3.8 MiB for a client that never reads. A quarter of the
    limit may wait to be sent (TCP_NOTSENT_LOWAT).
    """
    for listener in listening:
        if listener.fileno() >= 0:
            listener.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, memory_bytes // 2
            )  # the kernel doubles it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, memory_bytes // 4)


def limit_receive_buffers(listening: Iterable[socket.socket], memory_bytes: int) -> None:
    """Limit each accepted connection to `memory_bytes` of kernel memory for received, unread bytes.

    Without a limit, the kernel enlarges this buffer while the gateway reads, often to 32 MiB (the
    maximum of tcp_rmem). When reading is paused, it keeps what has arrived. The limit also caps the
    speed of uploads. It can be set up to twice net.core.rmem_max.
    """
    for listener in listening:
        if listener.fileno() >= 0:
            listener.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVBUF, memory_bytes // 2
            )  # the kernel doubles it


def sockets_from_systemd(env: MutableMapping[str, str]) -> SocketsByName:
    """Return the listening sockets that systemd opened for this process, by listener name.

    The result is empty if systemd opened none. The names come from LISTEN_FDNAMES if all of them
    are `api` or `admin`; otherwise the first socket is `api` and the second is `admin`. The LISTEN_
    variables are removed from `env`, so that child processes do not use the sockets.

    Raises ActivationError if a socket cannot be used.
    """
    pid, count, names = (env.pop(f"LISTEN_{key}", "") for key in ("PID", "FDS", "FDNAMES"))
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    inherited = [_adopt(FIRST_FD + number) for number in range(int(count))]
    names_given = names.split(":")
    if len(names_given) == len(inherited) and set(names_given) <= set(LISTENER_NAMES):
        return {
            name: tuple(
                listener
                for listener, own in zip(inherited, names_given, strict=True)
                if own == name
            )
            for name in names_given
        }
    if len(inherited) > len(LISTENER_NAMES):
        raise ActivationError(
            f"systemd passed {len(inherited)} sockets; set FileDescriptorName= of each one to "
            "api or admin"
        )
    return {name: (listener,) for name, listener in zip(LISTENER_NAMES, inherited, strict=False)}


def _adopt(fd: int) -> socket.socket:
    # Return an inherited file descriptor as a socket.
    #
    # Raises ActivationError unless it is a listening TCP socket.
    os.set_inheritable(fd, False)
    try:
        listener = socket.socket(fileno=fd)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ActivationError(
            f"file descriptor {fd}, passed by systemd, is not a socket: {error.strerror}"
        ) from None
    if (
        not listens
        or listener.type != socket.SOCK_STREAM
        or listener.family not in (socket.AF_INET, socket.AF_INET6)
    ):
        raise ActivationError(
            f"file descriptor {fd}, passed by systemd, is not a listening TCP socket; set "
            "ListenStream= to a port and Accept=no"
        )
    listener.setblocking(False)
    return listener

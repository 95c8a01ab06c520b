"""Listening sockets: bound here, or inherited from systemd (LISTEN_FDS) or the previous process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from types import MappingProxyType

BACKLOG = 4096
FIRST_FD = 3  # sd_listen_fds(3)
API, ADMIN = "api", "admin"
LISTENER_NAMES = (API, ADMIN)
ADMIN_RECEIVE_BUFFER = 256 * 1024  # bytes

SocketsByName = Mapping[str, tuple[socket.socket, ...]]
"""Listening sockets by the name of their listener."""

NO_SOCKETS: SocketsByName = MappingProxyType({})


class ActivationError(Exception):
    """The sockets from systemd cannot be used; the message is for the operator."""


def bind(host: str, port: int, *, reuse_port: bool = False) -> tuple[socket.socket, ...]:
    """Listen on every address of `host`. Raises OSError.

    With port 0, all of them share the port that the first one got.
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
    """Limit the kernel memory per accepted connection for unacknowledged bytes.

    Without a limit, the kernel keeps 3.8 MiB for a client that never reads. A quarter of the limit
    may wait to be sent; a client that acknowledges what it receives can fill no more than that.
    """
    for listener in listening:
        if listener.fileno() >= 0:
            listener.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, memory_bytes // 2
            )  # the kernel doubles it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, memory_bytes // 4)


def limit_receive_buffers(listening: Iterable[socket.socket], memory_bytes: int) -> None:
    """Limit the kernel memory per accepted connection for bytes that have not been read.

    Without a limit, the kernel may keep tcp_rmem's maximum, often 32 MiB, for a client that sends
    faster than it is read. That is for listeners without a fast upload: the limit caps throughput.
    """
    for listener in listening:
        # The kernel doubles the value.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, memory_bytes // 2)


def sockets_from_systemd(env: MutableMapping[str, str]) -> SocketsByName:
    """Return the sockets that systemd opened for this process, by name; none if it opened none.

    If LISTEN_FDNAMES uses only the names api and admin, they decide; otherwise the order does:
    first API, then admin. The variables are removed so that child processes do not use them. Raises
    ActivationError.
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
            f"there are {len(inherited)} sockets; "
            "name each of them api or admin with FileDescriptorName="
        )
    return {name: (listener,) for name, listener in zip(LISTENER_NAMES, inherited, strict=False)}


def _adopt(fd: int) -> socket.socket:
    """Return the socket of an inherited descriptor.

    Raises ActivationError unless it is a listening TCP socket.
    """
    os.set_inheritable(fd, False)
    try:
        listener = socket.socket(fileno=fd)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ActivationError(f"descriptor {fd} is not a socket: {error.strerror}") from None
    if (
        not listens
        or listener.type != socket.SOCK_STREAM
        or listener.family not in (socket.AF_INET, socket.AF_INET6)
    ):
        raise ActivationError(
            f"descriptor {fd} is not a listening TCP socket; "
            "set ListenStream= to a port and Accept=no"
        )
    listener.setblocking(False)
    return listener

"""Listening sockets: bound here, or given by systemd (LISTEN_FDS) or by the process that this one replaces."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from types import MappingProxyType

BACKLOG = 4096
FIRST_FD = 3  # sd_listen_fds(3)
API, ADMIN = "api", "admin"
NAMES = (API, ADMIN)

Sockets = Mapping[str, tuple[socket.socket, ...]]
"""Listening sockets by the name of their listener."""

EMPTY: Sockets = MappingProxyType({})


class ActivationError(Exception):
    """What systemd gave cannot be used; the message is for the operator."""


def bind(host: str, port: int, *, reuse_port: bool = False) -> tuple[socket.socket, ...]:
    """Listen on every address of `host`. With port 0 they share the port of the first. Raise OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if not port and bound:
                address = (address[0], bound[0].getsockname()[1], *address[2:])
            made = socket.socket(family, kind, protocol)
            bound.append(made)
            _listen(made, address, reuse_port)
    except OSError:
        for made in bound:
            made.close()
        raise
    return tuple(bound)


def _listen(made: socket.socket, address: tuple[object, ...], reuse_port: bool) -> None:
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if made.family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.setblocking(False)
    made.bind(address)
    made.listen(BACKLOG)


def bound_send_buffers(listening: Iterable[socket.socket], memory_bytes: int) -> None:
    """Limit what the kernel keeps for each connection accepted from now on: bytes that its client has not acknowledged.

    Without a limit the kernel keeps 3.8 MiB for a client that never reads. A quarter may wait to be sent: that is all
    that such a client can fill as long as it acknowledges what it was sent.
    """
    for each in listening:
        if each.fileno() >= 0:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, memory_bytes // 2)  # the kernel doubles it
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, memory_bytes // 4)


def from_systemd(env: MutableMapping[str, str]) -> Sockets:
    """The sockets that systemd opened for this process, by name; none if it opened none.

    Names api and admin in LISTEN_FDNAMES decide; with any other names the order does: API first, then admin. The
    variables are removed, so that no child takes them for its own. Raise ActivationError.
    """
    pid, count, names = (env.pop(f"LISTEN_{key}", "") for key in ("PID", "FDS", "FDNAMES"))
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    given = [_adopted(FIRST_FD + number) for number in range(int(count))]
    called = names.split(":")
    if len(called) == len(given) and set(called) <= set(NAMES):
        return {name: tuple(each for each, own in zip(given, called, strict=True) if own == name) for name in called}
    if len(given) > len(NAMES):
        raise ActivationError(f"{len(given)} sockets were given; name each of them api or admin (FileDescriptorName=)")
    return {name: (each,) for name, each in zip(NAMES, given, strict=False)}


def _adopted(fd: int) -> socket.socket:
    """The socket behind an inherited descriptor. Raise ActivationError if no gateway can listen on it."""
    os.set_inheritable(fd, False)
    try:
        given = socket.socket(fileno=fd)
        listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ActivationError(f"descriptor {fd} is no socket: {error.strerror}") from None
    if not listens or given.type != socket.SOCK_STREAM or given.family not in (socket.AF_INET, socket.AF_INET6):
        raise ActivationError(f"descriptor {fd} is no listening TCP socket (ListenStream= with a port, Accept=no)")
    given.setblocking(False)
    return given

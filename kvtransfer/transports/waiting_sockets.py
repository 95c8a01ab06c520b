"""Accepted sockets that wait to become links (connections between agents).

A link costs a thread and almost a millisecond of CPU time. So clients that have sent something come
first. Even thousands of clients that connect and send nothing do not delay other agents.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import Counter, deque

from kvtransfer.protocol.frame import PREAMBLE_BYTES
from kvtransfer.util.network_addresses import client_address

MOST_WAITING, MOST_PER_ADDRESS = 512, 256
"""Maximum numbers of waiting sockets.

MOST_WAITING applies to all of them, MOST_PER_ADDRESS to those of one IPv4 address or IPv6 /64. A
further socket closes an old one.
"""
SILENT_PERIOD_S = 0.02
"""Minimum seconds between two sockets that become links although they have sent nothing."""
_EVENTS = 256  # sockets that are looked at in one round


class WaitingSockets:
    """Accepted sockets that wait to become connections between agents; the number is limited.

    Sockets that have sent the beginning of a message become connections before all others. A client
    that sends one byte at a time therefore gains nothing.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for source in (listener, self._wake_fd):
            self._epoll.register(source, select.EPOLLIN)
        self._waiting: dict[int, tuple[socket.socket, str]] = {}  # by descriptor, oldest first
        self._address_of: dict[int, str] = {}
        self._count_of: Counter[str] = Counter()
        self._silent_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sock: socket.socket, peer: str) -> None:
        """Add an accepted socket.

        If its address has too many waiting sockets, the oldest of them is closed. If there are too
        many in total, the oldest one of the address with the most sockets is closed. Raises OSError
        if the socket has failed.
        """
        address = client_address(peer)
        if self._count_of[address] >= MOST_PER_ADDRESS:
            self._drop(next(fd for fd, other in self._address_of.items() if other == address))
        elif len(self._waiting) >= MOST_WAITING:
            heaviest = max(self._count_of.values())
            of = self._address_of.items()
            self._drop(next(fd for fd, other in of if self._count_of[other] == heaviest))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, PREAMBLE_BYTES)
        self._epoll.register(sock, select.EPOLLIN)
        self._waiting[sock.fileno()] = sock, peer
        self._address_of[sock.fileno()] = address
        self._count_of[address] += 1

    def wait_ready(self, now: float) -> list[tuple[socket.socket, str]]:
        """Wait for accepted sockets that may become connections between agents, and return them.

        now  current time in monotonic seconds

        The wait also ends when the listener can accept further sockets, or wake() is called. In the
        result, the peers' addresses take turns, and sockets that have sent nothing come last.
        """
        timeout_s = max(0.0, self._silent_at - now) if self._waiting else -1
        ready = [fd for fd, _ in self._epoll.poll(timeout_s, _EVENTS) if fd in self._waiting]
        sockets = [self._take(fd) for fd in self._by_turns(ready)]
        if not sockets and self._waiting and now >= self._silent_at:
            sockets = [self._take(next(iter(self._waiting)))]
            self._silent_at = now + SILENT_PERIOD_S
        return sockets

    def wake(self) -> None:
        """End the present call of wait_ready(), or else the next one. Any thread may call this."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close all waiting sockets; wake() must not be called any more."""
        for fd in list(self._waiting):
            self._drop(fd)
        self._epoll.close()
        os.close(self._wake_fd)

    def _by_turns(self, ready: list[int]) -> list[int]:
        # Return one socket of each address, then a second one of each, and so on.
        per_address: dict[str, deque[int]] = {}
        for fd in ready:
            per_address.setdefault(self._address_of[fd], deque()).append(fd)
        ordered: list[int] = []
        while len(ordered) < len(ready):
            ordered += [queue.popleft() for queue in per_address.values() if queue]
        return ordered

    def _take(self, fd: int) -> tuple[socket.socket, str]:
        sock, peer = self._waiting.pop(fd)
        self._epoll.unregister(fd)
        address = self._address_of.pop(fd)
        self._count_of[address] -= 1
        if not self._count_of[address]:
            del self._count_of[address]
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return sock, peer

    def _drop(self, fd: int) -> None:
        self._take(fd)[0].close()

"""Accepts the connections of other agents to a transport, in a thread, and keeps the open ones.

tcp.py and shm.py make a link (connection between agents) of a socket.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Generic, TypeVar

from kvtransfer.transport_interface import LinkOwner, TransportError
from kvtransfer.transports.stream.link import StreamLink
from kvtransfer.transports.waiting_sockets import WaitingSockets

_MOST_LINKS = 1024  # maximum number of links, each of which has a thread
_NO_LISTENER = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
_PAUSE_S = 0.05
_ACCEPTS = 64  # connections accepted in a row before the waiting ones are checked
_log = logging.getLogger("penstock")

L = TypeVar("L", bound=StreamLink)


def accepted_sockets(
    listener: socket.socket, closed: threading.Event
) -> Iterator[tuple[socket.socket, Any]]:
    """Yield (socket, address) of each accepted connection until the event `closed` is set.

    After an error, such as no free file descriptor, the accepting continues after a pause. The
    caller must close `listener` at the end.
    """
    while not closed.is_set():
        try:
            yield listener.accept()
        except OSError as error:
            if error.errno in _NO_LISTENER:
                return
            closed.wait(_PAUSE_S)


class LinkAcceptor(Generic[L]):
    """Accepts connections in a thread, and keeps the open links (connections between agents).

    make  function that makes a link of a socket. It can raise TransportError or OSError to refuse
          the connection
    """

    def __init__(self, make: Callable[[socket.socket, LinkOwner, str], L]) -> None:
        self._make = make
        self._owner: LinkOwner | None = None
        self._listener: socket.socket | None = None
        self._waiting: WaitingSockets | None = None
        self._thread: threading.Thread | None = None
        self._links: set[L] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self, owner: LinkOwner, listener: socket.socket, name: str) -> None:
        self._owner, self._listener = owner, listener
        listener.setblocking(False)
        self._waiting = WaitingSockets(listener)
        self._thread = threading.Thread(
            target=self._accept, args=(listener, self._waiting), name=name, daemon=True
        )
        self._thread.start()

    def add(self, sock: socket.socket, peer: str, *, dialled: bool) -> L:
        """Open a connection between two agents (link) over `sock`, and return it.

        On failure, closes the socket and raises TransportError.
        """
        assert self._owner is not None, "call start() first"
        try:
            link = self._make(sock, self._owner, peer)
        except (TransportError, OSError) as error:
            sock.close()
            raise TransportError(str(error)) from error
        with self._lock:
            self._links.add(link)
        link.open(dialled=dialled)
        if self._closed.is_set():
            link.close()
        return link

    def forget(self, link: L) -> None:
        with self._lock:
            self._links.discard(link)

    def close(self) -> None:
        """Stop accepting connections, close all open ones, and wait until their threads have
        ended.
        """
        self._closed.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._waiting is not None:
            self._waiting.wake()  # closing the listener alone would not wake the thread
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()
        for link in links:
            link.join()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def _accept(self, listener: socket.socket, waiting: WaitingSockets) -> None:
        while self._accept_available(listener, waiting):
            for sock, peer in waiting.wait_ready(monotonic()):
                self._add_logged(sock, peer)

    def _accept_available(self, listener: socket.socket, waiting: WaitingSockets) -> bool:
        # Accept some of the connections that have arrived; return False if the listener has closed.
        #
        # After any other error (no file descriptor left, the network is down) it waits.
        try:
            for _ in range(_ACCEPTS):
                sock, address = listener.accept()
                peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else ""
                try:
                    waiting.add(sock, peer)
                except OSError:
                    sock.close()
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _NO_LISTENER:
                return False
            self._closed.wait(_PAUSE_S)
        return not self._closed.is_set()

    def _add_logged(self, sock: socket.socket, peer: str) -> None:
        try:
            self._add_accepted(sock, peer)
        except TransportError as error:
            _log.warning("kv: a connection from %s was refused: %s", peer or "this host", error)

    def _add_accepted(self, sock: socket.socket, peer: str) -> None:
        if len(self._links) >= _MOST_LINKS:
            sock.close()
            raise TransportError(
                f"a connection was refused, because this agent already has {_MOST_LINKS} "
                "connections"
            )
        self.add(sock, peer, dialled=False)

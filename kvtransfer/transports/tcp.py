"""Tcp: the way between any two machines. Windows go from the source's memory into the socket, and from the sink's
socket into its memory, without a copy in between.

Not here: the thread that moves them (stream.py).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Sequence

from kvtransfer.regions import Region
from kvtransfer.transports.base import Link, LinkOwner, TransportError
from kvtransfer.transports.stream import Manner, StreamLink

_BUFFER_BYTES = 1 << 20
_DIAL_S = 3.0
_BACKLOG = 128
_MOST_LINKS = 1024  # a thread each; who floods us gets no more
_PASSING = {errno.ECONNABORTED, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class TcpLink(StreamLink):
    transport = "tcp"


class Tcp:
    """Listens on `host`, on a port of the kernel's choice unless one is given."""

    name = "tcp"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, manner: Manner | None = None) -> None:
        self._host, self._port, self._manner = host, port, manner or Manner()
        self._owner: LinkOwner | None = None
        self._listener: socket.socket | None = None
        self._links: set[TcpLink] = set()
        self._lock = threading.Lock()

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        self._owner = owner
        self._listener = socket.create_server((self._host, self._port), backlog=_BACKLOG)
        threading.Thread(target=self._accept, args=(self._listener,), name="kv-tcp-listen", daemon=True).start()
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def dial(self, address: str) -> Link:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), timeout=_DIAL_S)
        except (OSError, ValueError, OverflowError) as wrong:
            raise TransportError(f"{address} cannot be reached: {wrong}") from wrong
        return self._link(sock, address, dialled=True)

    def close(self) -> None:
        if self._listener is not None:
            # Closing alone would leave the thread in accept().
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()
        for link in links:
            link.join()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, (host, port, *_) = listener.accept()
            except OSError as wrong:
                if wrong.errno in _PASSING:
                    continue
                return
            if len(self._links) >= _MOST_LINKS:
                sock.close()
            else:
                self._link(sock, f"{host}:{port}", dialled=False)

    def _link(self, sock: socket.socket, peer: str, *, dialled: bool) -> TcpLink:
        assert self._owner is not None, "start() comes first"
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        link = TcpLink(sock, self._owner, peer, self._manner, self._forget)
        with self._lock:
            self._links.add(link)
        link.open(dialled=dialled)
        return link

    def _forget(self, link: TcpLink) -> None:
        with self._lock:
            self._links.discard(link)

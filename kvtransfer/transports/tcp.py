"""Tcp: the way between any two machines. Windows go from the source's memory into the socket, and from the sink's
socket into its memory, without a copy in between.

Not here: the thread that moves them (stream.py), who may connect (the agents' handshake).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from kvtransfer.regions import Region
from kvtransfer.transports.base import Link, LinkOwner, TransportError
from kvtransfer.transports.lanes import LanedLink
from kvtransfer.transports.listening import Listening
from kvtransfer.transports.stream import Manner, StreamLink

_BUFFER_BYTES = 1 << 20
_DIAL_S = 3.0
_BACKLOG = 128


class TcpLink(LanedLink):
    transport = "tcp"


class Tcp:
    """Listens on `host`, on a port of the kernel's choice unless one is given.

    advertise   the name or address under which peers reach `host`, where that is another (0.0.0.0, behind a NAT)
    """

    name = "tcp"
    _made: type[StreamLink] = TcpLink

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, manner: Manner | None = None, *, advertise: str | None = None
    ) -> None:
        self._host, self._port, self._manner, self._advertise = host, port, manner or Manner(), advertise
        self.sealed: bool | None = self._manner.sealed
        self._listening: Listening[StreamLink] = Listening(self._link)

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._port), family=family, backlog=_BACKLOG)
        except OSError as wrong:
            raise TransportError(f"cannot listen on {self._host}:{self._port}: {wrong}") from wrong
        self._listening.start(owner, listener, "kv-tcp-listen")
        host, port = listener.getsockname()[:2]
        return f"{self._advertise or host}:{port}"

    def dial(self, address: str) -> Link:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), timeout=_DIAL_S)
        except (OSError, ValueError, OverflowError) as wrong:
            raise TransportError(f"{address} cannot be reached: {wrong}") from wrong
        return self._listening.add(sock, address, dialled=True)

    def close(self) -> None:
        self._listening.close()

    def _link(self, sock: socket.socket, owner: LinkOwner, peer: str) -> StreamLink:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        return self._made(sock, owner, peer, self._manner, self._listening.forget)

"""The KV transport over TCP between any two machines, with TLS if configured.

Without TLS, KV goes from the source's memory into the socket, and from the socket into the sink's
memory, without further copies. stream/link.py has the thread that moves it. The agents' handshake
decides who may connect.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import Link, LinkOwner, TransportError
from kvtransfer.transports.acceptor import LinkAcceptor
from kvtransfer.transports.stream.link import StreamLink
from kvtransfer.transports.stream.link_options import LinkOptions
from kvtransfer.transports.stream.parallel_links import LanedLink
from kvtransfer.transports.tls_links import TlsContexts, TlsLink
from kvtransfer.util.network_addresses import split_host_port
from kvtransfer.util.tls_files import TlsFiles

_BUFFER_BYTES = 1 << 20
_DIAL_S = 3.0
_BACKLOG = 1024  # a full backlog costs a dialling peer a second


class TcpLink(LanedLink):
    """One end of a connection between two agents over TCP without TLS."""

    transport = "tcp"
    _is_pumped = True


class Tcp:
    """A KV transport that listens on `host`:`port` (0: any free port) for TCP connections.

    advertise   the name or address under which peers reach `host`, if different (0.0.0.0, NAT)
    tls         certificate files with which all bytes are encrypted; peers must use TLS, too;
                None: no TLS
    """

    name = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        options: LinkOptions | None = None,
        *,
        advertise: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        # Initialize without listening. Raises TransportError for unusable TLS files.
        self._host = host
        self._port = port
        self._options = options or LinkOptions()
        self._advertise = advertise
        self._tls = None if tls is None else TlsContexts(tls)
        self.is_sealed: bool | None = self._options.sealed or tls is not None
        self._listening: LinkAcceptor[StreamLink] = LinkAcceptor(self._link)

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server(
                (self._host, self._port), family=family, backlog=_BACKLOG
            )
        except OSError as error:
            raise TransportError(
                f"the TCP transport cannot listen on {self._host}:{self._port}: {error}"
            ) from error
        self._listening.start(owner, listener, "kv-tcp-listen")
        host, port = listener.getsockname()[:2]
        return f"{self._advertise or host}:{port}"

    def dial(self, address: str) -> Link:
        try:
            host, port = split_host_port(address)
            sock = socket.create_connection((host, port), timeout=_DIAL_S)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(
                f"the agent at {address} cannot be reached by TCP: {error}"
            ) from error
        if self._tls is None:
            return self._listening.add(sock, address, dialled=True)
        return self._dial_tls(self._tls, sock, host, address)

    def _dial_tls(self, tls: TlsContexts, sock: socket.socket, host: str, address: str) -> Link:
        try:
            wrapped = tls.client(sock, host)
        except (
            OSError,
            ValueError,
        ) as error:  # ValueError: a host name that no certificate can contain
            sock.close()
            raise TransportError(
                f"the agent at {address} cannot be reached by TLS: {error}"
            ) from error
        link = self._listening.add(wrapped, address, dialled=True)
        assert isinstance(link, TlsLink)
        link.wait_for_handshake(_DIAL_S)
        return link

    def close(self) -> None:
        self._listening.close()

    def _link(self, sock: socket.socket, owner: LinkOwner, peer: str) -> StreamLink:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        if self._tls is not None:
            wrapped = sock if isinstance(sock, ssl.SSLSocket) else self._tls.server(sock)
            return TlsLink(
                wrapped,
                owner,
                peer,
                self._options,
                self._listening.forget,
                self._tls.files.peer_name,
            )
        return TcpLink(sock, owner, peer, self._options, self._listening.forget)

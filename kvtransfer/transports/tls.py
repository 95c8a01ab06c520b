"""TLS for links over TCP: certificates at both ends, files that are read again when they change.

Not here: which connections there are (tcp.py), the proof of the fleet's key, which follows inside (session.py).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kvtransfer.tls_files import TlsFiles
from kvtransfer.transports.base import LinkOwner, TransportError, WindowHead
from kvtransfer.transports.inbound import Inbound
from kvtransfer.transports.lanes import LanedLink
from kvtransfer.transports.outbound import Outbound
from kvtransfer.transports.scatter import vectors_at
from kvtransfer.transports.stream import Manner

_RECORD_BYTES = (
    16 << 10
)  # A retry after a full socket must offer at least as much as before: one record at most.
_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_log = logging.getLogger("penstock")

Signature = tuple[tuple[int, int, int], ...]


class TlsContexts:
    """What connections begin with. Changed files apply to new connections; files that do not load are not used."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises TransportError, which names the files."""
        self.files = files
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._client, self._server = self._load()

    def client(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
        """The dialling end of a connection to `host`, its handshake still to come."""
        context, _ = self._current()
        name = self.files.peer_name or host
        return context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)

    def server(self, sock: socket.socket) -> ssl.SSLSocket:
        """The other end of a connection, its handshake still to come."""
        _, context = self._current()
        return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        with self._lock:
            seen = self._signature()
            if seen != self._seen:
                self._seen = seen
                try:
                    self._client, self._server = self._load()
                    _log.info("kv: TLS certificate %s was read again", self.files.certificate)
                except TransportError as error:
                    _log.error("kv: the TLS files before stay in use: %s", error)
            return self._client, self._server

    def _signature(self) -> Signature:
        return tuple(
            _identity(path) for path in (self.files.certificate, self.files.key, self.files.ca)
        )

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
        context.verify_mode = ssl.CERT_REQUIRED
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no session is resumed
        files = self.files
        try:
            # Without `password` OpenSSL would ask for one on the terminal.
            context.load_cert_chain(files.certificate, files.key, password=lambda: "")
        except OSError as error:
            both = f"{files.certificate} and {files.key}"
            raise TransportError(f"{both} cannot be used for TLS: {_text(error)}") from error
        try:
            context.load_verify_locations(cafile=files.ca)
        except OSError as error:
            raise TransportError(f"{files.ca} cannot be used for TLS: {_text(error)}") from error
        return context


class TlsLink(LanedLink):
    """A link whose bytes go through TLS. Its thread makes the handshake before anything else."""

    transport = "tcp"

    def __init__(
        self,
        sock: ssl.SSLSocket,
        owner: LinkOwner,
        peer: str,
        manner: Manner,
        ended: Callable[[Any], None],
        peer_name: str,
    ) -> None:
        super().__init__(sock, owner, peer, manner, ended)
        self._tls, self._peer_name = sock, peer_name
        self._out = _TlsOutbound(sock, self._sent, checked=manner.checked)
        self._in = _TlsInbound(sock, self._receive, self, self._in.limits)
        self._handshake_over = threading.Event()

    def wait_for_handshake(self, timeout_s: float) -> None:
        """Raises TransportError, and the link is closed, if the handshake fails or takes longer."""
        if not self._handshake_over.wait(timeout_s):
            self.close()
            raise TransportError(f"no TLS handshake with {self.peer} within {timeout_s:g} s")
        if self._broken is not None:
            raise TransportError(f"{self.peer}: {self._broken}")

    # ---- on the link's thread ----

    def _prepare(self) -> None:
        try:
            with self._lead:
                while not self._closing and not self._shake():
                    pass
        except OSError as error:
            self._broken = f"TLS: {_text(error)}"
        except Exception:
            _log.exception("the owner of the link to %s failed", self.peer)
            self._broken = "the owner of the link failed"
        finally:
            self._handshake_over.set()

    def _shake(self) -> bool:
        """A step of the handshake, and a wait for the next. True when it is over."""
        self._obey()
        if self._closing:
            return True
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._wait(select.POLLIN)
            return False
        except ssl.SSLWantWriteError:
            self._wait(select.POLLOUT)
            return False
        self._check_peer()
        return True

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._tls, event)
        poll.register(self._bell, select.POLLIN)
        poll.poll()

    def _check_peer(self) -> None:
        """OpenSSL has compared names where this end dialled. Where the peer dialled, that is left to us."""
        if not self._peer_name or self._dialled:
            return
        certificate: Any = self._tls.getpeercert() or {}
        names = [
            str(name).lower()
            for kind, name in certificate.get("subjectAltName", ())
            if kind == "DNS"
        ]
        if self._peer_name.lower() not in names:
            raise ssl.SSLCertVerificationError(
                f"the certificate of {self.peer} does not hold {self._peer_name}"
            )

    def _receive(self, buffer: memoryview) -> int:
        try:
            return self._tls.recv_into(buffer)
        except _WAITS as wait:
            raise BlockingIOError from wait

    def _want_in(self, least: int) -> None:
        """A poll cannot count bytes here: part of a record may be in OpenSSL's buffer already."""


class _TlsInbound(Inbound):
    def __init__(
        self, sock: ssl.SSLSocket, receive: Callable[[memoryview], int], hearer: Any, limits: Any
    ) -> None:
        super().__init__(sock.fileno(), receive, hearer, limits)
        self._tls = sock

    def _readv(self, fd: int, address: int, count: int) -> int:
        """As readv(2). Reads until the vectors are full or no whole record is left."""
        total = 0
        for view in vectors_at(address, count):
            at = 0
            while at < len(view):
                try:
                    got = self._tls.recv_into(view[at:])
                except _WAITS:
                    return total or _would_block()
                if not got:
                    return total
                at, total = at + got, total + got
        return total


class _TlsOutbound(Outbound):
    def __init__(
        self, sock: ssl.SSLSocket, sent: Callable[[WindowHead], None], *, checked: bool
    ) -> None:
        super().__init__(sock.fileno(), sent, checked=checked)
        self._tls = sock
        self._record = memoryview(bytearray(_RECORD_BYTES))

    def _writev(self, fd: int, address: int, count: int) -> int:
        """As writev(2), a record at a time. After a full socket the same bytes form the first record again."""
        total = 0
        for record in self._records(vectors_at(address, count)):
            try:
                total += self._tls.send(record)
            except _WAITS:
                return total or _would_block()
        return total

    def _records(self, views: list[memoryview]) -> Iterator[memoryview]:
        """All bytes in order: whole records from where they lie, the ends of vectors and short ones copied together."""
        held = 0
        for view in views:
            at = 0
            while at < len(view):
                if not held and len(view) - at >= _RECORD_BYTES:
                    yield view[at : at + _RECORD_BYTES]
                    at += _RECORD_BYTES
                    continue
                size = min(_RECORD_BYTES - held, len(view) - at)
                self._record[held : held + size] = view[at : at + size]
                at, held = at + size, held + size
                if held == _RECORD_BYTES:
                    yield self._record
                    held = 0
        if held:
            yield self._record[:held]

    def _send(self, data: memoryview) -> int:
        try:
            return self._tls.send(data[:_RECORD_BYTES])
        except _WAITS as wait:
            raise BlockingIOError from wait


def _would_block() -> int:
    ctypes.set_errno(errno.EAGAIN)
    return -1


def _identity(path: str) -> tuple[int, int, int]:
    """What changes when a file is written or replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


def _text(error: OSError) -> str:
    why: str = getattr(error, "verify_message", "")  # of a certificate that was refused
    return why or error.strerror or str(error)

"""TLS for connections between KV agents, with certificates at both ends.

Certificate files are reloaded when they change. tcp.py has the connections. Inside TLS, agents also
prove that they have the fleet's key (protocol/session_authentication.py).
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

from kvtransfer.transport_interface import LinkOwner, TransportError, WindowHead
from kvtransfer.transports.iovec import vectors_at
from kvtransfer.transports.stream.inbound import Inbound
from kvtransfer.transports.stream.link_options import LinkOptions
from kvtransfer.transports.stream.outbound import Outbound
from kvtransfer.transports.stream.parallel_links import LanedLink
from kvtransfer.util.tls_files import TlsFiles

# A retry after a full socket must offer at least as much as before: one record at most.
_RECORD_BYTES = 16 << 10
_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_log = logging.getLogger("penstock")

Signature = tuple[tuple[int, int, int], ...]


class TlsContexts:
    """The TLS settings of new connections. They are reloaded when a certificate file changes.

    If the new files cannot be loaded, the previous settings stay in use.
    """

    def __init__(self, files: TlsFiles) -> None:
        # Load the files. Raises TransportError, with the file names, if they cannot be used.
        self.files = files
        self._lock = threading.Lock()
        self._loaded_signature = self._signature()
        self._client, self._server = self._load()

    def client(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
        """Return a TLS socket for opening a connection to `host`, before its handshake."""
        context, _ = self._current()
        name = self.files.peer_name or host
        return context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)

    def server(self, sock: socket.socket) -> ssl.SSLSocket:
        """Return a TLS socket for an accepted connection, before its handshake."""
        _, context = self._current()
        return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        with self._lock:
            signature = self._signature()
            if signature != self._loaded_signature:
                self._loaded_signature = signature
                try:
                    self._client, self._server = self._load()
                    _log.info("kv: reloaded the TLS certificate %s", self.files.certificate)
                except TransportError as error:
                    _log.error(
                        "kv: the new TLS files cannot be used, so the earlier ones stay in use: %s",
                        error,
                    )
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
            context.num_tickets = 0  # no session resumption
        files = self.files
        try:
            # Without `password`, OpenSSL would prompt on the terminal.
            context.load_cert_chain(files.certificate, files.key, password=lambda: "")
        except OSError as error:
            both = f"{files.certificate} and {files.key}"
            raise TransportError(f"{both} cannot be used for TLS: {_error_text(error)}") from error
        try:
            context.load_verify_locations(cafile=files.ca)
        except OSError as error:
            raise TransportError(
                f"{files.ca} cannot be used for TLS: {_error_text(error)}"
            ) from error
        return context


class TlsLink(LanedLink):
    """A connection between two agents over TLS, whose thread performs the handshake first."""

    transport = "tcp"
    _can_send_at_once = False  # OpenSSL allows one thread at a time on a connection

    def __init__(
        self,
        sock: ssl.SSLSocket,
        owner: LinkOwner,
        peer: str,
        options: LinkOptions,
        ended: Callable[[Any], None],
        peer_name: str,
    ) -> None:
        super().__init__(sock, owner, peer, options, ended)
        self._tls, self._peer_name = sock, peer_name
        self._out = _TlsOutbound(sock, self._sent, checked=options.checked)
        self._in = _TlsInbound(sock, self._receive, self, self._in.limits)
        self._handshake_over = threading.Event()

    def wait_for_handshake(self, timeout_s: float) -> None:
        """Wait until the TLS handshake is over, at most `timeout_s` seconds.

        Raises TransportError if the handshake fails or is late; the connection is then closed.
        """
        if not self._handshake_over.wait(timeout_s):
            self.close()
            raise TransportError(
                f"the TLS handshake with {self.peer} did not complete within {timeout_s:g} s"
            )
        if self._broken is not None:
            raise TransportError(f"the TLS connection to {self.peer} failed: {self._broken}")

    # ---- on the link's thread ----

    def _prepare(self) -> None:
        try:
            with self._driver_lock:
                while not self._closing and not self._step_handshake():
                    pass
        except OSError as error:
            self._broken = f"TLS: {_error_text(error)}"
        except Exception:
            _log.exception("kv: handling an event of the link to %s failed", self.peer)
            self._broken = "this agent failed to handle an event of the link"
        finally:
            self._handshake_over.set()

    def _step_handshake(self) -> bool:
        # Perform one step of the handshake, and wait for the next.
        #
        # Return True when it is complete.
        self._run_orders()
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
        poll.register(self._wake_fd, select.POLLIN)
        poll.poll()

    def _check_peer(self) -> None:
        # Check the certificate's name of a peer that has dialled this end.
        #
        # OpenSSL itself checks the name of a peer that this end has dialled.
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
                f"the certificate of {self.peer} does not contain {self._peer_name}"
            )

    def _receive(self, buffer: memoryview) -> int:
        try:
            return self._tls.recv_into(buffer)
        except _WAITS as wait:
            raise BlockingIOError from wait

    def _want_in(self, least: int) -> None:
        """Do nothing, because a poll cannot count bytes that OpenSSL has already buffered."""


class _TlsInbound(Inbound):
    def __init__(
        self, sock: ssl.SSLSocket, receive: Callable[[memoryview], int], hearer: Any, limits: Any
    ) -> None:
        super().__init__(sock.fileno(), receive, hearer, limits)
        self._tls = sock

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not self._tls.pending()

    def _readv(self, fd: int, address: int, count: int) -> int:
        # Read like readv(2), until the pieces are full or no complete TLS record is left.
        total = 0
        for view in vectors_at(address, count):
            offset = 0
            while offset < len(view):
                try:
                    count_read = self._tls.recv_into(view[offset:])
                except _WAITS:
                    return total or _would_block()
                if not count_read:
                    return total
                offset, total = offset + count_read, total + count_read
        return total


class _TlsOutbound(Outbound):
    def __init__(
        self, sock: ssl.SSLSocket, sent: Callable[[WindowHead], None], *, checked: bool
    ) -> None:
        super().__init__(sock.fileno(), sent, checked=checked)
        self._tls = sock
        self._record = memoryview(bytearray(_RECORD_BYTES))

    def _writev(self, fd: int, address: int, count: int) -> int:
        # Write like writev(2), one TLS record at a time.
        #
        # After a full socket, the same first record is sent again.
        total = 0
        for record in self._records(vectors_at(address, count)):
            try:
                total += self._tls.send(record)
            except _WAITS:
                return total or _would_block()
        return total

    def _records(self, views: list[memoryview]) -> Iterator[memoryview]:
        # Yield the bytes of these pieces of memory as TLS records, in order.
        #
        # Whole records are not copied; shorter pieces are combined.
        buffered = 0
        for view in views:
            offset = 0
            while offset < len(view):
                if not buffered and len(view) - offset >= _RECORD_BYTES:
                    yield view[offset : offset + _RECORD_BYTES]
                    offset += _RECORD_BYTES
                    continue
                size = min(_RECORD_BYTES - buffered, len(view) - offset)
                self._record[buffered : buffered + size] = view[offset : offset + size]
                offset, buffered = offset + size, buffered + size
                if buffered == _RECORD_BYTES:
                    yield self._record
                    buffered = 0
        if buffered:
            yield self._record[:buffered]

    def _send(self, data: memoryview) -> int:
        try:
            return self._tls.send(data[:_RECORD_BYTES])
        except _WAITS as wait:
            raise BlockingIOError from wait


def _would_block() -> int:
    ctypes.set_errno(errno.EAGAIN)
    return -1


def _identity(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino


def _error_text(error: OSError) -> str:
    reason: str = getattr(error, "verify_message", "")  # reason for refusing a certificate
    return reason or error.strerror or str(error)

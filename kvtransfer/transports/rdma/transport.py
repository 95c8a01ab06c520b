"""The KV transport over RDMA. Each RDMA connection has a TCP connection for control messages.

The sink sends keys for the blocks that a transfer writes, and invalidates them before the blocks
get a new owner. Its device then refuses late writes, whatever the other agent does. link.py has the
connections, verbs.py the calls of the RDMA library.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvtransfer.layout.memory_regions import Region
from kvtransfer.transport_interface import LinkOwner, TransportError
from kvtransfer.transports.acceptor import accepted_sockets
from kvtransfer.transports.rdma import verbs
from kvtransfer.transports.rdma.link import RdmaLink, RdmaOptions
from kvtransfer.transports.rdma.verbs import Device, ProtectionDomain
from kvtransfer.util.network_addresses import split_host_port

MOST_LINKS = 1024
_DIAL_S = 3.0
_log = logging.getLogger("penstock")


class Rdma:
    """A KV transport over RDMA. It listens on `host`:`port` (0: any free port) by TCP.

    The memory that a source reads is registered in one protection domain, which allows no writes. A
    sink has a protection domain for each connection, so that keys are useless to other agents.
    """

    name = "rdma"
    is_sealed: bool | None = False

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, options: RdmaOptions | None = None
    ) -> None:
        self._host, self._port = host, port
        self._options = options or RdmaOptions()
        self._links: set[RdmaLink] = set()
        self._gate = threading.Condition()
        self._closed = threading.Event()
        self._dials = 0
        self._owner: LinkOwner | None = None
        self._device: Device | None = None
        self._domain: ProtectionDomain | None = None
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._listen, name="kv-rdma-listen", daemon=True)

    @staticmethod
    def unavailable(device: str | None = None) -> str | None:
        """Return why RDMA cannot be used on this host; None if it can."""
        return verbs.unavailable(device)

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        """Register the KV memory for reading by the RDMA device, and listen.

        Returns the address for peers.

        Raises TransportError without a device.
        """
        self._owner = owner
        self._device = Device(self._options.device, self._options.gid_index)
        try:
            self._domain = ProtectionDomain(self._device)
            for region in regions:
                self._domain.key_of(region)
            self._listener = socket.create_server((self._host, self._port), backlog=128)
        except (TransportError, OSError) as error:
            self.close()
            raise TransportError(
                f"the RDMA transport cannot listen at {self._host}:{self._port}: {error}"
            ) from error
        self._thread.start()
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def dial(self, address: str) -> RdmaLink:
        """Connect to the agent at `address`, and return the RDMA connection.

        Raises TransportError if that fails.
        """
        with self._dialling():
            try:
                sock = socket.create_connection(split_host_port(address), timeout=_DIAL_S)
            except (OSError, ValueError, OverflowError) as error:
                raise TransportError(
                    f"the agent at {address} cannot be reached by RDMA: {error}"
                ) from error
            link = self._link(sock, None)
            link.wait_connected()
            return link

    def close(self) -> None:
        """Close all links, threads and the device. Do not call this on the thread of a link."""
        with self._gate:
            was_closed = self._closed.is_set()
            self._closed.set()
        if was_closed or self._device is None:
            return
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._thread.join()
            self._listener.close()
        with self._gate:  # no link is added after this
            links = list(self._links)
        for link in links:
            link.close()
        for link in links:
            link.join()
        with self._gate:
            self._gate.wait_for(lambda: not self._dials)
        with ExitStack() as ends:  # close all parts, whatever fails
            ends.callback(self._device.close)
            if self._domain is not None:
                ends.callback(self._domain.close)

    @contextmanager
    def _dialling(self) -> Iterator[None]:
        # Keep the device open while the `with` block runs.
        #
        # Raises TransportError if the transport is not open.
        with self._gate:
            if self._closed.is_set() or self._device is None:
                raise TransportError(
                    "the RDMA transport is not open; start the agent before it connects to others"
                )
            self._dials += 1
        try:
            yield
        finally:
            with self._gate:
                self._dials -= 1
                self._gate.notify_all()

    def _listen(self) -> None:
        assert self._listener is not None
        for sock, (host, *_) in accepted_sockets(self._listener, self._closed):
            try:
                self._link(sock, self._domain)
            except TransportError as error:
                # The device has no resources left, or the peer has already gone.
                _log.warning("kv: an RDMA connection from %s was refused: %s", host, error)

    def _link(self, sock: socket.socket, domain: ProtectionDomain | None) -> RdmaLink:
        # Create a link over the socket `sock`, and start it.
        #
        # Without a domain this end has dialled, and gets its own domain. Raises TransportError,
        # after releasing everything, if the link cannot start.
        owner, own = self._owner, None
        assert owner is not None
        assert self._device is not None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if domain is None:
                own = domain = ProtectionDomain(self._device)
            link = RdmaLink(
                sock, domain, owner, self._options, lambda link_gone: self._forget(link_gone, own)
            )
        except (TransportError, OSError) as error:
            _release(sock, own)
            raise TransportError(str(error)) from error
        reason = f"the transport is closing, or has {MOST_LINKS} connections already"
        with self._gate:
            if not self._closed.is_set() and len(self._links) < MOST_LINKS:
                try:
                    link.begin(self._closed, dialled=own is not None)
                    self._links.add(link)
                    return link
                except RuntimeError as error:
                    reason = f"its thread cannot be started: {error}"
        link.abandon()
        _release(sock, own)
        raise TransportError(reason)

    def _forget(self, link: RdmaLink, domain: ProtectionDomain | None) -> None:
        try:
            _release(None, domain)
        except TransportError as error:
            _log.error("kv: an error followed the end of the link to %s: %s", link.peer, error)
        finally:
            with self._gate:
                # Last, because `close` waits for the links it finds here and then closes the
                # device.
                self._links.discard(link)


def _release(sock: socket.socket | None, domain: ProtectionDomain | None) -> None:
    if sock is not None:
        sock.close()
    if domain is not None:
        domain.close()

"""RDMA: links over reliable queue pairs, with a TCP connection beside each on which its ends talk.

The sink hands out keys that cover a transfer's reserved blocks and takes them back before the blocks change hands: its
device then refuses a late write, whatever the peer does. Not here: a link's life (rdma_link.py), the verbs (verbs.py).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvtransfer.regions import Region
from kvtransfer.transports import verbs
from kvtransfer.transports.base import LinkOwner, TransportError
from kvtransfer.transports.rdma_link import RdmaLink, RdmaOptions
from kvtransfer.transports.verbs import Device, Domain

MOST_LINKS = 1024
_DIAL_S = 3.0


class Rdma:
    """Listens on `host`:`port` (0: any) for the side channels; the bytes take the device's own way.

    Whoever is dialled reads its regions through one protection domain for all peers, in which nothing can be written.
    Whoever dials has a domain per link: a peer's keys are worth nothing on another peer's connection.
    """

    name = "rdma"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, options: RdmaOptions | None = None) -> None:
        self._host, self._port = host, port
        self._options = options or RdmaOptions()
        self._links: set[RdmaLink] = set()
        self._gate = threading.Condition()
        self._closed = False
        self._dials = 0
        self._owner: LinkOwner | None = None
        self._device: Device | None = None
        self._domain: Domain | None = None
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._listen, name="kv-rdma-listen", daemon=True)

    @staticmethod
    def unavailable(device: str | None = None) -> str | None:
        """Why there is no RDMA on this host; None where there is."""
        return verbs.unavailable(device)

    def start(self, owner: LinkOwner, regions: Sequence[Region]) -> str:
        """Register the regions for our own reading, and listen. Raises TransportError without a device."""
        self._owner = owner
        self._device = Device(self._options.device, self._options.gid_index)
        try:
            self._domain = Domain(self._device)
            for region in regions:
                self._domain.key_of(region)
            self._listener = socket.create_server((self._host, self._port), backlog=128)
        except (TransportError, OSError) as wrong:
            self.close()
            raise TransportError(f"cannot listen at {self._host}:{self._port}: {wrong}") from wrong
        self._thread.start()
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def dial(self, address: str) -> RdmaLink:
        """A link with its queue pair connected. Raises TransportError."""
        with self._dialling():
            host, _, port = address.rpartition(":")
            try:
                side = socket.create_connection((host, int(port)), timeout=_DIAL_S)
            except (OSError, ValueError, OverflowError) as wrong:
                raise TransportError(f"cannot reach {address}: {wrong}") from wrong
            link = self._link(side, None)
            link.settled()
            return link

    def close(self) -> None:
        """Every link ends, and every thread; then the device is let go. May be called twice, not by a link's thread."""
        with self._gate:
            self._closed, was_closed = True, self._closed
        if was_closed or self._device is None:
            return
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            self._thread.join()
            self._listener.close()
        with self._gate:  # no link comes after this
            links = list(self._links)
        for link in links:
            link.close()
        for link in links:
            link.join()
        with self._gate:
            self._gate.wait_for(lambda: not self._dials)
        if self._domain is not None:
            self._domain.close()
        self._device.close()

    @contextmanager
    def _dialling(self) -> Iterator[None]:
        """The device stays while this lasts."""
        with self._gate:
            if self._closed or self._device is None:
                raise TransportError("the transport is not open")
            self._dials += 1
        try:
            yield
        finally:
            with self._gate:
                self._dials -= 1
                self._gate.notify_all()

    def _listen(self) -> None:
        while self._listener is not None:
            try:
                side, _ = self._listener.accept()
            except OSError:
                return
            with suppress(TransportError):  # the device has no more to give, or the peer has gone already
                self._link(side, self._domain)

    def _link(self, side: socket.socket, domain: Domain | None) -> RdmaLink:
        """Begin a link over `side`. With no domain given we are the ones who dialled, and it gets one of its own.

        Who was dialled is told once the queue pair is connected. TransportError if it cannot be.
        """
        owner, own = self._owner, None
        assert owner is not None
        assert self._device is not None
        try:
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if domain is None:
                own = domain = Domain(self._device)
            link = RdmaLink(side, domain, owner, self._options, lambda gone: self._forget(gone, own))
        except (TransportError, OSError) as wrong:
            _let_go(side, own)
            raise TransportError(str(wrong)) from wrong
        with self._gate:
            if not self._closed and len(self._links) < MOST_LINKS:
                self._links.add(link)
                link.begin(None if own is not None else lambda: owner.linked(link))
                return link
        link.abandon()
        _let_go(side, own)
        raise TransportError("the transport is closing, or has too many links")

    def _forget(self, link: RdmaLink, domain: Domain | None) -> None:
        try:
            _let_go(None, domain)
        finally:
            with self._gate:  # not before: `close` waits for those it finds here, and then lets the device go
                self._links.discard(link)


def _let_go(side: socket.socket | None, domain: Domain | None) -> None:
    if side is not None:
        side.close()
    if domain is not None:
        domain.close()

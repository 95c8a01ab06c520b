"""RDMA: links over reliable queue pairs, with a TCP connection beside each on which its ends talk.

The sink hands out keys that cover a transfer's reserved blocks and takes them back before the blocks change hands: its
device then refuses a late write, whatever the peer does. Not here: a link's life (rdma_link.py), the verbs (verbs.py).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

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
        self._gate = threading.Lock()
        self._closed = False
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
        self._domain = Domain(self._device)
        for region in regions:
            self._domain.key_of(region)
        try:
            self._listener = socket.create_server((self._host, self._port), backlog=128)
        except OSError as wrong:
            raise TransportError(f"cannot listen at {self._host}:{self._port}: {wrong}") from wrong
        self._thread.start()
        return "{}:{}".format(*self._listener.getsockname()[:2])

    def dial(self, address: str) -> RdmaLink:
        """A link with its queue pair connected. Raises TransportError."""
        if self._device is None:
            raise TransportError("the transport has not been started")
        host, _, port = address.rpartition(":")
        try:
            side = socket.create_connection((host, int(port)), timeout=_DIAL_S)
        except (OSError, ValueError, OverflowError) as wrong:
            raise TransportError(f"cannot reach {address}: {wrong}") from wrong
        link = self._link(side, Domain(self._device), own=True)
        link.begin()
        link.settled()
        return link

    def close(self) -> None:
        """Every link ends, and every thread; then the device is let go. May be called twice."""
        with self._gate:
            self._closed, was_closed = True, self._closed
            links = list(self._links)
        if was_closed or self._device is None:
            return
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            self._thread.join()
            self._listener.close()
        for link in links:
            link.close()
        for link in links:
            link.join()
        if self._domain is not None:
            self._domain.close()
        self._device.close()

    def _listen(self) -> None:
        while self._listener is not None:
            try:
                side, _ = self._listener.accept()
            except OSError:
                return
            self._welcome(side)

    def _welcome(self, side: socket.socket) -> None:
        """A peer has dialled: the owner hears of it once the queue pair is connected."""
        with self._gate:
            room = len(self._links) < MOST_LINKS and not self._closed
        if not room or self._domain is None or self._owner is None:
            side.close()
            return
        owner = self._owner
        try:
            link = self._link(side, self._domain, own=False)
        except (TransportError, OSError):  # the device has no more to give, or the peer has gone already
            side.close()
            return
        link.begin(lambda: owner.linked(link))

    def _link(self, side: socket.socket, domain: Domain, *, own: bool) -> RdmaLink:
        side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert self._owner is not None
        link = RdmaLink(
            side, domain, self._owner, self._options, lambda gone: self._forget(gone, domain if own else None)
        )
        with self._gate:
            self._links.add(link)
        return link

    def _forget(self, link: RdmaLink, domain: Domain | None) -> None:
        if domain is not None:
            domain.close()
        with self._gate:
            self._links.discard(link)

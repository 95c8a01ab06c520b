"""The queue pairs of one RDMA connection, one per epoch; both ends change epoch together.

A queue pair is usable once both ends have connected theirs: Setup is sent both ways, then Ready.
"""

from __future__ import annotations

from kvtransfer.transport_interface import TransportError
from kvtransfer.transports.rdma.control import QueuePairReady, QueuePairSetup
from kvtransfer.transports.rdma.sender import MOST_WINDOWS, MOST_WRITES
from kvtransfer.transports.rdma.verbs import CompletionQueue, ProtectionDomain, QueuePair

EXPECTED = 2 * MOST_WINDOWS
_MOST_EPOCHS = 1 << 24


class QueuePairEpochs:
    """The current queue pair of an RDMA connection, and its completion queue.

    A refused write ends a queue pair. `renew` then replaces it; the number of the pair is the
    epoch.

    pair         the queue pair; None until the first `renew`
    is_writable  whether the peer's queue pair is connected as well
    """

    def __init__(self, domain: ProtectionDomain) -> None:
        self._domain = domain
        # Twice, because completions of an ended pair may still be queued when the next pair's
        # arrive.
        self.completions = CompletionQueue(domain.device, 2 * (MOST_WRITES + EXPECTED))
        self.pair: QueuePair | None = None
        self.epoch = -1
        self.is_writable = False
        self._joined = False

    def renew(self) -> QueuePairSetup:
        """End the current queue pair, create the next epoch's one, and return the message about the
        new one.

        Raises TransportError after the last possible epoch.
        """
        self.end()
        if self.epoch >= _MOST_EPOCHS:
            raise TransportError(
                "the link has used all queue pair epochs, so it must be opened again"
            )
        self.epoch += 1
        self.pair = QueuePair(self._domain, self.completions, self.epoch, MOST_WRITES, EXPECTED)
        for _ in range(EXPECTED):
            self.pair.post_receive()
        return QueuePairSetup(self.epoch, self.pair.card)

    def join(self, setup: QueuePairSetup) -> QueuePairReady | None:
        """Connect to the peer's queue pair, as described in its message `setup`.

        Returns the message to send to the peer, or None if that epoch is over or already connected.
        Raises TransportError for a later epoch.
        """
        if setup.epoch < self.epoch or self._joined or self.pair is None:
            return None
        if setup.epoch > self.epoch:
            raise TransportError(
                f"the peer is at queue pair epoch {setup.epoch}, this end is at {self.epoch}"
            )
        self.pair.connect(setup.card)
        self._joined = True
        return QueuePairReady(self.epoch)

    def on_ready(self, message: QueuePairReady) -> None:
        """Record the peer's message that its end of the queue pair is connected."""
        self.is_writable = self._joined and (self.is_writable or message.epoch == self.epoch)

    def end(self) -> None:
        """Close the current queue pair at once, so that neither end of the connection reads or
        writes memory.
        """
        self.is_writable = self._joined = False
        if self.pair is not None:
            self.pair.close()
            self.pair = None

    def close(self) -> None:
        self.end()
        self.completions.close()

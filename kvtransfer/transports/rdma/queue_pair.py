"""Creates and replaces the ends of one RDMA connection, which RDMA calls queue pairs.

A queue pair can be used after both agents have sent QueuePairSetup and QueuePairReady. A refused
write ends it. Both agents then replace it by a new one, numbered by the next epoch.
"""

from __future__ import annotations

from kvtransfer.transport_interface import TransportError
from kvtransfer.transports.rdma.control import QueuePairReady, QueuePairSetup
from kvtransfer.transports.rdma.sender import MOST_WINDOWS, MOST_WRITES
from kvtransfer.transports.rdma.verbs import CompletionQueue, ProtectionDomain, QueuePair

EXPECTED = 2 * MOST_WINDOWS
_MOST_EPOCHS = 1 << 24


class QueuePairEpochs:
    """This agent's end of an RDMA connection: the current queue pair, and its completion queue.

    A refused write ends a queue pair. `renew` then replaces it; the number of the pair is its
    epoch.

    pair         the queue pair; None until the first `renew`
    is_writable  whether the other agent's queue pair is connected as well
    """

    def __init__(self, domain: ProtectionDomain) -> None:
        self._domain = domain
        # The queue has room for two pairs, because completions of an ended pair may still be queued
        # when those of the next pair arrive.
        self.completions = CompletionQueue(domain.device, 2 * (MOST_WRITES + EXPECTED))
        self.pair: QueuePair | None = None
        self.epoch = -1
        self.is_writable = False
        self._joined = False

    def renew(self) -> QueuePairSetup:
        """Replace this agent's end of the RDMA connection, and return the message that describes
        the new one.

        Raises TransportError after the last possible epoch.
        """
        self.end()
        if self.epoch >= _MOST_EPOCHS:
            raise TransportError(
                f"the RDMA connection has replaced its queue pair {self.epoch} times, the "
                "maximum; open a new connection"
            )
        self.epoch += 1
        self.pair = QueuePair(self._domain, self.completions, self.epoch, MOST_WRITES, EXPECTED)
        for _ in range(EXPECTED):
            self.pair.post_receive()
        return QueuePairSetup(self.epoch, self.pair.card)

    def join(self, setup: QueuePairSetup) -> QueuePairReady | None:
        """Connect to the queue pair of the other agent, which its message `setup` describes.

        Returns the message to send back, or None if that epoch is over or already connected. Raises
        TransportError if it is a later epoch than this agent's.
        """
        if setup.epoch < self.epoch or self._joined or self.pair is None:
            return None
        if setup.epoch > self.epoch:
            raise TransportError(
                f"the other agent's queue pair has the epoch {setup.epoch}, but this agent's "
                f"has {self.epoch}"
            )
        self.pair.connect(setup.card)
        self._joined = True
        return QueuePairReady(self.epoch)

    def on_ready(self, message: QueuePairReady) -> None:
        """Record that the other agent has connected its end of the queue pair."""
        self.is_writable = self._joined and (self.is_writable or message.epoch == self.epoch)

    def end(self) -> None:
        """Close the current queue pair immediately. Afterwards neither agent reads or writes memory
        by it.
        """
        self.is_writable = self._joined = False
        if self.pair is not None:
            self.pair.close()
            self.pair = None

    def close(self) -> None:
        self.end()
        self.completions.close()

"""The queue pairs of one RDMA link, one after the other: each epoch has its own, and both ends move on together.

A pair is of use once both ends have connected theirs: Setup goes both ways, then Ready goes both ways. Not here: what
is written over it, or the channel on which the ends talk.
"""

from __future__ import annotations

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.rdma_out import MOST_WINDOWS, MOST_WRITES
from kvtransfer.transports.rdma_side import Ready, Setup
from kvtransfer.transports.verbs import Completions, Domain, QueuePair

EXPECTED = 2 * MOST_WINDOWS
_MOST_EPOCHS = 1 << 24


class Pairs:
    """`pair` is None until `renew`; `writable`: the peer's end is connected, too."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        # Twice: the completions of a pair that has ended may still be there when the next one's come.
        self.completions = Completions(domain.device, 2 * (MOST_WRITES + EXPECTED))
        self.pair: QueuePair | None = None
        self.epoch = -1
        self.writable = False
        self._joined = False

    def renew(self) -> Setup:
        """The next epoch's pair. The last one does nothing more once this returns."""
        self.end()
        if self.epoch >= _MOST_EPOCHS:
            raise TransportError("this link has been broken and mended too often")
        self.epoch += 1
        self.pair = QueuePair(self._domain, self.completions, self.epoch, MOST_WRITES, EXPECTED)
        for _ in range(EXPECTED):
            self.pair.expect()
        return Setup(self.epoch, self.pair.card)

    def join(self, setup: Setup) -> Ready | None:
        """Connect to the peer's pair of our epoch; None for one that is past, or joined already."""
        if setup.epoch < self.epoch or self._joined or self.pair is None:
            return None
        if setup.epoch > self.epoch:
            raise TransportError(f"the peer is at epoch {setup.epoch}, we are at {self.epoch}")
        self.pair.connect(setup.card)
        self._joined = True
        return Ready(self.epoch)

    def ready(self, said: Ready) -> None:
        self.writable = self._joined and (self.writable or said.epoch == self.epoch)

    def end(self) -> None:
        """Stop reading and writing, at once."""
        self.writable = self._joined = False
        if self.pair is not None:
            self.pair.close()
            self.pair = None

    def close(self) -> None:
        self.end()
        self.completions.close()

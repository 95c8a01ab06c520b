"""Flow control of sending KV: order of transfers, bytes in flight to a peer, measured bandwidth.

All functions are pure: the caller passes `now`. The gateway's policies choose a peer by bandwidth.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Priority(IntEnum):
    """The priorities of KV transfers, in descending order of urgency.

    INTERACTIVE  a client waits for the first token
    BULK         the transfer fills a cache
    MIGRATION    the transfer moves KV away from a group that is to be emptied
    """

    INTERACTIVE = 0
    BULK = 1
    MIGRATION = 2

    @classmethod
    def from_name(cls, word: str) -> Priority:
        """Return the priority of this name, in any case. Raises ValueError for an unknown name."""
        try:
            return cls[word.upper()]
        except KeyError:
            raise ValueError(
                f"priority must be one of {', '.join(cls.__members__).lower()}, not {word!r}"
            ) from None


class SendCredits:
    """A limit on the bytes of KV that are in flight to one peer.

    Sending a window (piece of KV) takes credit for its bytes; their arrival returns it. A window
    larger than the whole limit is sent when nothing else is in flight. Not thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes must be positive, not {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.in_flight_bytes = 0
        self._by_transfer: dict[int, int] = {}

    def try_acquire(self, transfer: int, n_bytes: int) -> bool:
        """Take send credit for `n_bytes` bytes of a transfer, if there is enough.

        Returns whether it was taken.
        """
        if self.in_flight_bytes and self.in_flight_bytes + n_bytes > self.budget_bytes:
            return False
        self.in_flight_bytes += n_bytes
        self._by_transfer[transfer] = self._by_transfer.get(transfer, 0) + n_bytes
        return True

    def put_back(self, transfer: int, n_bytes: int) -> None:
        """Give back the send credit of `n_bytes` bytes of a transfer that have arrived.

        Raises ValueError if fewer bytes of the transfer are in flight.
        """
        in_flight = self._by_transfer.get(transfer, 0)
        if not 0 <= n_bytes <= in_flight:
            raise ValueError(
                f"send credit for {n_bytes} bytes was returned, but only "
                f"{in_flight} bytes were in flight"
            )
        self._by_transfer[transfer] = in_flight - n_bytes
        self.in_flight_bytes -= n_bytes
        if in_flight == n_bytes:
            self._by_transfer.pop(transfer, None)

    def forget(self, transfer: int) -> int:
        """Give back all send credit of a finished transfer.

        Returns the number of its bytes that were in flight.
        """
        in_flight = self._by_transfer.pop(transfer, 0)
        self.in_flight_bytes -= in_flight
        return in_flight


class QueuedTransfer(msgspec.Struct, frozen=True):
    """A transfer whose KV is waiting to be sent.

    deadline  time by which the transfer should end, in seconds on the owner's clock
    since     time at which the transfer began to wait, on the same clock
    """

    transfer: int
    priority: Priority
    deadline: float
    since: float


class TransferOrder:
    """A queue of KV transfers, ordered by priority, then earliest deadline, then longest wait.

    Every `promote_s` seconds of waiting raise a transfer's priority by one level. So every transfer
    is sent at some time.
    """

    def __init__(self, promote_s: float = 0.5) -> None:
        self._promote_s = promote_s
        self._turns: dict[int, QueuedTransfer] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, transfer: int, priority: Priority, deadline: float, now: float) -> None:
        """Add a KV transfer to the queue. One that is already queued keeps its place."""
        self._turns.setdefault(transfer, QueuedTransfer(transfer, priority, deadline, now))

    def remove(self, transfer: int) -> None:
        """Remove a KV transfer from the queue; do nothing if it is not queued."""
        self._turns.pop(transfer, None)

    def next(self, now: float) -> int | None:
        """Return the number of the transfer that sends KV next; None if none is queued.

        The transfer stays queued; the caller removes it when it has no more KV to send.
        """
        if len(self._turns) < 2:
            return next(iter(self._turns), None)
        return min(
            self._turns.values(),
            key=lambda turn: (self._effective_priority(turn, now), turn.deadline, turn.since),
        ).transfer

    def _effective_priority(self, turn: QueuedTransfer, now: float) -> int:
        return max(0, turn.priority - int((now - turn.since) / self._promote_s))


class BandwidthMeter:
    """Measures bytes per second by (peer, transport); recent measurements count more.

    Every `half_life_s` seconds of sending halve the weight of earlier measurements. Bytes and
    seconds are summed separately, so that many small transfers do not outweigh a large one. At most
    `max_entries` pairs are stored; the least recently used is dropped first.
    """

    def __init__(self, half_life_s: float = 1.0, max_entries: int = 1024) -> None:
        self._half_life_s, self._most = half_life_s, max_entries
        self._decayed: dict[tuple[str, str], tuple[float, float]] = {}

    def record(self, peer: str, transport: str, n_bytes: int, seconds: float) -> None:
        """Record that sending `n_bytes` bytes to a peer took `seconds`; a time of 0 is ignored."""
        if seconds <= 0:
            return
        old_bytes, old_seconds = self._decayed.pop((peer, transport), (0.0, 0.0))
        fade = 0.5 ** (seconds / self._half_life_s)
        self._decayed[peer, transport] = (old_bytes * fade + n_bytes, old_seconds * fade + seconds)
        if len(self._decayed) > self._most:
            del self._decayed[next(iter(self._decayed))]

    def bytes_per_s(self, peer: str, transport: str) -> float | None:
        """Return the measured bytes per second to a peer over a transport.

        Return None if there are none.
        """
        decayed = self._decayed.get((peer, transport))
        return None if decayed is None else decayed[0] / decayed[1]

    def all(self) -> dict[tuple[str, str], float]:
        """Return every measured bandwidth in bytes per second, by (peer, transport)."""
        return {pair: n_bytes / seconds for pair, (n_bytes, seconds) in self._decayed.items()}

    def forget(self, peer: str) -> None:
        """Drop the measured bandwidth of a peer that has gone for good."""
        for pair in [pair for pair in self._decayed if pair[0] == peer]:
            del self._decayed[pair]

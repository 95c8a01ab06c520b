"""Limits the bytes of KV that are in flight to one peer (send credits). No I/O."""

from __future__ import annotations

from kvtransfer.transfer.transfer_order import Priority

# Transfers for which no client waits leave most of the bytes in flight to others.
_URGENT_FACTOR = 4


def in_flight_limit(budget_bytes: int, window_bytes: int, priority: Priority) -> int:
    """Return how many bytes may be in flight to a peer when a transfer's next window is sent.

    budget_bytes  the sink's limit
    window_bytes  maximum size of the transfer's windows

    Interactive transfers use the whole limit, others a quarter but at least two windows: an urgent
    transfer waits for what is in flight. Both ends compute the same.
    """
    if priority is Priority.INTERACTIVE:
        return budget_bytes
    return min(budget_bytes, max(budget_bytes // _URGENT_FACTOR, 2 * window_bytes))


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

    def try_acquire(self, transfer: int, n_bytes: int, limit_bytes: int | None = None) -> bool:
        """Take send credit for `n_bytes` bytes of a transfer, if there is enough.

        `limit_bytes` replaces the whole limit for this window. Returns whether it was taken.
        """
        limit = self.budget_bytes if limit_bytes is None else limit_bytes
        if self.in_flight_bytes and self.in_flight_bytes + n_bytes > limit:
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

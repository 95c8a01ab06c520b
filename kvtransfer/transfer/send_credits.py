"""Limits how many bytes of KV an agent sends to another one before their arrival is reported.

These bytes are called in flight.
"""

from __future__ import annotations

from kvtransfer.transfer.transfer_order import Priority

# Transfers for which no client waits leave most of the bytes in flight to others.
_URGENT_FACTOR = 4


def in_flight_limit(budget_bytes: int, window_bytes: int, priority: Priority) -> int:
    """Return how many bytes of KV may be in flight (sent, but not reported as arrived) to an agent.

    budget_bytes  limit of the receiving agent
    window_bytes  maximum size of the units (windows) in which the transfer is sent
    priority      priority of the transfer. Interactive ones may use the whole limit

    Other transfers may use a quarter of it, but at least two windows, because an urgent transfer
    must wait for what is in flight. Both agents compute the same number.
    """
    if priority is Priority.INTERACTIVE:
        return budget_bytes
    return min(budget_bytes, max(budget_bytes // _URGENT_FACTOR, 2 * window_bytes))


class SendCredits:
    """Limits the bytes of KV in flight (sent, but not reported as arrived) to one agent.

    KV is sent in units called windows. Sending one takes as much credit as it has bytes, and its
    arrival gives the credit back. A window that is larger than the limit is sent when nothing else
    is in flight. Not thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes must be positive, not {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.in_flight_bytes = 0
        self._by_transfer: dict[int, int] = {}

    def try_acquire(self, transfer: int, n_bytes: int, limit_bytes: int | None = None) -> bool:
        """Take credit to send `n_bytes` bytes of a transfer, and return whether there was enough.

        limit_bytes  maximum bytes in flight, if this transfer may not use the whole limit
        """
        limit = self.budget_bytes if limit_bytes is None else limit_bytes
        if self.in_flight_bytes and self.in_flight_bytes + n_bytes > limit:
            return False
        self.in_flight_bytes += n_bytes
        self._by_transfer[transfer] = self._by_transfer.get(transfer, 0) + n_bytes
        return True

    def put_back(self, transfer: int, n_bytes: int) -> None:
        """Give back credit, because `n_bytes` bytes of a transfer have arrived.

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
        """Give back all credit of a transfer that has ended, so that others may send.

        Returns how many of its bytes were in flight.
        """
        in_flight = self._by_transfer.pop(transfer, 0)
        self.in_flight_bytes -= in_flight
        return in_flight

"""Limits the bytes of KV that are in flight to one peer (send credits). No I/O."""

from __future__ import annotations


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

"""The newest ended requests, kept in memory for the admin pages /requests and /explain.

The setting `observability.explained` is their number. pick_explanation.py explains one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from gateway.telemetry.pick_explanation import as_json

EndedExchange = tuple[Exchange, TokenUsage, int, float]
"""An ended exchange, with the engine's token counts, the number of the response's events, and the
monotonic time of its end."""


class RecentExchanges:
    """A ring buffer of the newest `size` ended requests, which `penstock explain` explains."""

    __slots__ = ("_ring", "size")

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._ring: deque[EndedExchange] = deque(maxlen=size)

    def resize(self, size: int) -> None:
        """Set how many ended requests are kept for explanations. A new number drops all of them."""
        if size != self.size:
            self.size, self._ring = size, deque(maxlen=size)

    def add(self, exchange: Exchange, usage: TokenUsage, events: int, now: float) -> None:
        """Store an ended request for explanations, and free its large objects."""
        exchange.drop_heavy_fields()
        self._ring.append((exchange, usage, events, now))

    def newest_first(self) -> Iterator[EndedExchange]:
        return reversed(self._ring)

    def newest_as_json(self) -> dict[str, object] | None:
        """Return the explanation of the request that ended last, or None if there is none."""
        return as_json(self._ring[-1][0]) if self._ring else None

    def find_as_json(self, request_id: str) -> dict[str, object] | None:
        """Return the explanation of the request with this id; None if it is not stored.

        Only the newest requests are stored.
        """
        return next((as_json(ended[0]) for ended in self._ring if ended[0].id == request_id), None)

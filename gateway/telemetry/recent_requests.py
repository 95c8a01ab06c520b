"""The newest ended requests, kept in memory for the admin pages /requests and /explain.

The setting `observability.explained` is their number. pick_explanation.py explains one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from gateway.protocol.response.usage_and_error_search import TokenUsage
from gateway.request_record import Exchange
from gateway.telemetry.pick_explanation import as_json

USUAL_PER_S = 64.0
"""Number of requests per second without a problem that are kept for explanations in the long run.

At thousands of requests per second, the ring would cover a tenth of a second, and its memory would
not be in the processor's cache when it is used again, which takes 16 % of the CPU time of a
request with the policy `priced`.
"""

GOOD_OUTCOMES = frozenset({"", "met"})

EndedExchange = tuple[Exchange, TokenUsage, int, float]
"""An ended exchange, with the engine's token counts, the number of the response's events, and the
monotonic time of its end."""


def has_problem(exchange: Exchange) -> bool:
    """Return whether the request was not served completely, or missed its latency target (SLO).

    A batch request that was interrupted has no problem, because a later attempt continues it.
    """
    if exchange.outcome == "preempted":
        return False
    return exchange.outcome != "served" or exchange.slo_outcome not in GOOD_OUTCOMES


class RecentExchanges:
    """A ring buffer of the newest `size` ended requests, which `penstock explain` explains."""

    __slots__ = ("_ring", "_room", "_room_at", "size")

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._room, self._room_at = float(size), 0.0
        self._ring: deque[EndedExchange] = deque(maxlen=size)

    def resize(self, size: int) -> None:
        """Set how many ended requests are kept for explanations. A new number drops all of them."""
        if size != self.size:
            self.size, self._ring = size, deque(maxlen=size)

    def has_room(self, now: float) -> bool:
        """Return whether a request should be kept if it has no problem, and count it if so.

        The first `size` requests of a burst are kept, then USUAL_PER_S per second.

        now  monotonic time in seconds
        """
        room = min(self.size, self._room + (now - self._room_at) * USUAL_PER_S)
        self._room_at = now
        has_room = room >= 1.0
        self._room = room - 1.0 if has_room else room
        return has_room

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

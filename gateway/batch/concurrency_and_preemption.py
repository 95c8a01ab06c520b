"""Decides how many batch requests a pool may run, and which ones are interrupted (preempted).

The number follows the pool's load. It grows slowly while no request waits and live requests meet
their latency targets. It shrinks at the first sign that live requests might miss their targets.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

GROW_EVERY_S = 0.25
CUT_EVERY_S = 0.25
HOLD_S = 1.0  # time without growth after a sign of pressure
QUIET_S = 0.1  # time without a waiting request before another request of a batch starts
CUT = 0.5  # factor by which one cut reduces the limit
CAUTION = 0.7  # share of a latency target from which a measured latency counts as pressure
FIRST_LIMIT = 4.0


class PoolReading(msgspec.Struct, frozen=True):
    """One reading of a pool's load, from which the limit of batch requests is computed.

    places   number of requests that the available endpoints may run at once
    busy     number of requests that run there now, including batch requests
    waiting  number of other requests that wait to run
    price    the price of admission, which rises with overload; 0 without overload
    missed   number of other requests that missed a latency target
    ttft_s   TTFT of batch requests in seconds; None while none was measured
    tpot_s   TPOT of batch requests in seconds; None while none was measured
    """

    places: int
    busy: int
    waiting: int = 0
    price: float = 0.0
    missed: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None


class LatencyTargets(msgspec.Struct, frozen=True):
    """The strictest latency targets of a pool's live requests (not of batches), in seconds."""

    ttft_s: float
    tpot_s: float


class ConcurrencyLimiter:
    """Limits the number of batch requests that run concurrently in one pool.

    limit  the limit that the latency of live requests permits; fewer run if fewer places are free
    """

    def __init__(self, share: float, most: int) -> None:
        """Create the limit for one pool.

        share  largest share of the pool's capacity that batch requests may use
        most   maximum number of batch requests in the pool
        """
        self.share, self.most = share, most
        self.limit = min(FIRST_LIMIT, float(most))
        self._cut_at = self._grown_at = self._waited_at = float("-inf")

    def allow(
        self,
        reading: PoolReading,
        targets: LatencyTargets,
        running: int,
        now: float,
        reserved: int = 0,
    ) -> int:
        """Return how many batch requests the pool may run now.

        reading   the pool's load since the previous call
        targets   latency targets of the other requests
        running   number of batch requests that run now; if the result is lower, the caller must
                  interrupt the difference
        now       monotonic time in seconds
        reserved  number of batch requests to permit at any load, because a completion window ends
                  soon
        """
        self._adapt(running, now, is_pressed=_is_pressed(reading, targets))
        free = int(self.share * reading.places) - (reading.busy - running)
        allowed = min(int(self.limit), free)
        # A waiting request takes the place of one that runs now. That says nothing about the
        # latencies, so the limit stays.
        if reading.waiting:
            self._waited_at = now
        if now - self._waited_at < QUIET_S:
            allowed = min(allowed, running - reading.waiting)
        return max(0, allowed, min(reserved, self.most))

    def _adapt(self, running: int, now: float, *, is_pressed: bool) -> None:
        # Cut the limit under pressure; let it grow while it is used and nothing speaks against it.
        if is_pressed:
            if now - self._cut_at >= CUT_EVERY_S:
                self.limit, self._cut_at = max(1.0, min(self.limit, running) * CUT), now
        elif running >= int(self.limit) and now - max(self._cut_at + HOLD_S, self._grown_at) >= (
            GROW_EVERY_S
        ):
            self.limit, self._grown_at = min(self.most, self.limit + max(1.0, self.limit / 8)), now


def _is_pressed(reading: PoolReading, targets: LatencyTargets) -> bool:
    late = reading.ttft_s is not None and reading.ttft_s > CAUTION * targets.ttft_s
    slow = reading.tpot_s is not None and reading.tpot_s > CAUTION * targets.tpot_s
    return bool(reading.missed or reading.price > 0 or late or slow)


def choose_preempted(costs: Sequence[tuple[bool, int]], count: int) -> list[int]:
    """Return the indexes of the `count` running batch requests that cost least to interrupt.

    `costs` has two values for each running request: whether its batch is short of time, and how
    many tokens it would have to generate again. Among requests of equal cost, the newest ones (with
    the highest indexes) are chosen.
    """
    order = sorted(range(len(costs)), key=lambda index: (costs[index], -index))
    return order[:count]

"""Holds requests back from endpoints whose engine or provider refuses them for some time.

A 429 or 503 is no fault of the endpoint, so it is not ejected. But it answers faster than any other
endpoint, and has no load: without a pause, policies would try it first for every request.
"""

from __future__ import annotations

from gateway.fleet.endpoint_registry import LiveEndpoint

LEAST_WAIT_S, MOST_WAIT_S = 1.0, 60.0
"""Bounds on the seconds for which an endpoint is held back; the first holds without Retry-After."""


def hold_back(live: LiveEndpoint, wait_s: float | None, now: float) -> None:
    """Limit the endpoint's concurrent requests for some seconds, while others have capacity.

    With a Retry-After it gets none. Without one, the engine may only be full: the requests that it
    runs are what it accepts, so their number is the limit, and it gets none only if it runs none.
    Afterwards the limit grows step by step, as after a stall.

    wait_s  what the engine asked for in Retry-After; None if it did not say
    """
    until = now + min(MOST_WAIT_S, max(LEAST_WAIT_S, wait_s or 0.0))
    accepted = live.load.in_flight - 1 if wait_s is None else 0  # without the refused request
    live.refused_until = max(live.refused_until, until)
    live.slow_start_at, live.throttled_until = None, live.refused_until
    live.load.soft_cap = max(0, min(live.load.soft_cap, accepted))
    live.load.mark_changed()

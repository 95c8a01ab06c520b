"""Backs off from endpoints whose engine or provider refuses requests with status 429 or 503.

A refusal is no fault of the endpoint, so the endpoint is not ejected. But it refuses faster than
others serve, and has no load. Without a pause, policies would pick it first for every request.
"""

from __future__ import annotations

from gateway.fleet.live_endpoint import LiveEndpoint

LEAST_WAIT_S, MOST_WAIT_S = 1.0, 60.0
"""Bounds on the seconds for which an endpoint is held back; the first holds without Retry-After."""


def hold_back(live: LiveEndpoint, wait_s: float | None, now: float) -> None:
    """Limit the endpoint's concurrent requests for some seconds, while others have capacity.

    - With a Retry-After, it gets no requests for that time.
    - Without one, its engine is probably full. The number of requests that it runs becomes the
      limit; if it runs none, it gets none.

    Afterwards the limit grows step by step, as after a stall.

    wait_s  the seconds in the response's Retry-After; None if it had none
    """
    until = now + min(MOST_WAIT_S, max(LEAST_WAIT_S, wait_s or 0.0))
    accepted = live.load.in_flight - 1 if wait_s is None else 0  # without the refused request
    live.refused_until = max(live.refused_until, until)
    live.slow_start_at, live.throttled_until = None, live.refused_until
    live.load.soft_cap = max(0, min(live.load.soft_cap, accepted))
    live.load.mark_changed()

"""Holds requests back from endpoints whose engine or provider refuses them for some time.

A 429 or 503 is no fault of the endpoint, so it is not ejected. But it answers faster than any other
endpoint, and has no load: without a pause, policies would try it first for every request.
"""

from __future__ import annotations

from gateway.fleet.endpoint_registry import LiveEndpoint

LEAST_WAIT_S, MOST_WAIT_S = 1.0, 60.0
"""Bounds on the seconds for which an endpoint is held back; the first holds without Retry-After."""


def hold_back(live: LiveEndpoint, wait_s: float | None, now: float) -> None:
    """Send the endpoint no requests for some seconds, while other endpoints have capacity.

    Afterwards its limit of concurrent requests grows from one, as after a stall.

    wait_s  what the engine asked for in Retry-After; None if it did not say
    """
    until = now + min(MOST_WAIT_S, max(LEAST_WAIT_S, wait_s or 0.0))
    live.refused_until = max(live.refused_until, until)
    live.slow_start_at, live.throttled_until, live.load.soft_cap = None, live.refused_until, 0
    live.load.mark_changed()

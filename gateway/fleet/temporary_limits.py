"""Temporary limits on an endpoint's concurrent requests: slow start, refusals (429, 503), slowness.

Such a limit applies while other endpoints have capacity (EndpointLoad.soft_cap).
endpoint_load_and_health.py decides when each limit begins.
"""

from __future__ import annotations

from gateway.fleet.live_endpoint import LiveEndpoint
from policies.endpoint_load import NO_SOFT_CAP
from policies.health import late_request_detection, slow_start
from policies.health.endpoint_speed import SpeedVerdict

LEAST_WAIT_S, MOST_WAIT_S = 1.0, 60.0
"""Bounds on the seconds for which an endpoint is held back; the first holds without Retry-After."""


def hold_back(live: LiveEndpoint, wait_s: float | None, now: float) -> None:
    """Limit the endpoint's concurrent requests for some seconds, because its engine refused one.

    A refusal (429, 503) is not a fault of the endpoint, so the endpoint is not ejected. But because
    it refuses requests faster than others serve them, it would have the least load, and policies
    would pick it first for every request.

    - With a Retry-After, the endpoint gets no requests for that time.
    - Without one, its engine is probably full. The limit becomes the number of requests that it
      runs, which may be 0.

    Afterwards the limit grows step by step, as after a stall.

    wait_s  the seconds in the response's Retry-After; None if it had none
    """
    until = now + min(MOST_WAIT_S, max(LEAST_WAIT_S, wait_s or 0.0))
    # The refused request does not count.
    accepted = live.load.in_flight - 1 if wait_s is None else 0
    live.refused_until = max(live.refused_until, until)
    live.slow_start_at, live.throttled_until = None, live.refused_until
    live.load.soft_cap = max(0, min(live.load.soft_cap, accepted))
    live.load.mark_changed()


def begin_slow_start(live: LiveEndpoint, ramp_s: float, now: float) -> None:
    """Limit an endpoint that enters rotation, because its caches are cold.

    The limit rises for `ramp_s` seconds.
    """
    live.slow_start_at = now
    live.load.soft_cap = slow_start.soft_cap(live.endpoint.max_concurrency, 0.0, ramp_s)
    live.load.mark_changed()


def throttle(live: LiveEndpoint, now: float) -> None:
    """Send a late endpoint no requests while others have capacity, until its speed is reviewed."""
    if live.speed.verdict is SpeedVerdict.SUSPECT:
        live.load.soft_cap = 0
    elif live.load.soft_cap == NO_SOFT_CAP or live.throttled_until is not None:
        until = max(now + late_request_detection.DOUBT_S, live.refused_until)
        live.load.soft_cap, live.throttled_until = 0, until
    live.load.mark_changed()


def limit_suspect(live: LiveEndpoint) -> None:
    """Send few requests to an endpoint that seems slow, as long as others have capacity."""
    live.slow_start_at, live.load.soft_cap = None, late_request_detection.SUSPECT_CEILING
    live.load.mark_changed()


def admit_reviewed(live: LiveEndpoint, now: float) -> None:
    """Send an endpoint few requests instead of none, because its speed has been reviewed."""
    if live.load.soft_cap == 0 and now >= live.refused_until:
        live.load.soft_cap = late_request_detection.SUSPECT_CEILING
        live.load.mark_changed()


def raise_limits(live: LiveEndpoint, ramp_s: float, now: float) -> None:
    """Raise or end the limits of an endpoint that are due at the time `now`.

    `ramp_s` is the duration of a slow start in seconds.
    """
    load = live.load
    if live.throttled_until is not None and now >= live.throttled_until:
        ceiling = load.soft_cap = late_request_detection.raised_ceiling(load.soft_cap)
        load.mark_changed()
        live.throttled_until = (
            None if ceiling == NO_SOFT_CAP else now + late_request_detection.RAMP_S
        )
    if live.slow_start_at is not None:
        warm_s = now - live.slow_start_at
        cap = load.soft_cap = slow_start.soft_cap(live.endpoint.max_concurrency, warm_s, ramp_s)
        load.mark_changed()
        if cap == NO_SOFT_CAP:
            live.slow_start_at = None

"""How many replicas a load needs: Little's law, and the ceiling of one replica."""

from __future__ import annotations

from math import ceil

# Products of measured rates and times are not exact: 120.0000000001 requests need no sixth replica.
_ROUNDING = 1e-9


def concurrency_of(rate_s: float, request_s: float) -> float:
    """Return the requests in progress at a rate and a time per request (Little's law)."""
    return rate_s * request_s


def replicas_for(concurrency: float, ceiling: int) -> int:
    """Return the replicas for so many requests at once, when each holds `ceiling` of them.

    Raises ValueError for a ceiling below one: a replica that holds no request serves no load.
    """
    if ceiling < 1:
        raise ValueError(f"a replica that holds {ceiling} requests serves none")
    return max(1, ceil(concurrency / ceiling - _ROUNDING))


def ceiling_of(kv_requests: int, promise_requests: int, cap: int | None) -> int:
    """Return the requests that one replica takes at once.

    kv_requests       that its KV cache holds
    promise_requests  the largest batch that keeps the promised time per token
    cap               max_concurrency of the gateway; None: no cap
    """
    return min(kv_requests, promise_requests, kv_requests if cap is None else cap)

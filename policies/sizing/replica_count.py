"""Computes how many replicas a load needs: Little's law, one replica's limit, and waiting times."""

from __future__ import annotations

from math import ceil, inf, log

# Products of measured rates and times are not exact: 120.0000000001 requests need no sixth replica.
_ROUNDING = 1e-9
# Steps of 1/16 from a load of one reach a million replicas in about 250.
_MAX_STEPS = 1000


def concurrency_of(rate_s: float, request_s: float) -> float:
    """Return the mean number of requests in progress (Little's law).

    rate_s     requests per second
    request_s  seconds per request
    """
    return rate_s * request_s


def replicas_for(concurrency: float, ceiling: int) -> int:
    """Return the number of replicas for `concurrency` requests at once.

    One replica serves at most `ceiling` requests at once. Raises ValueError if that is below one.
    """
    if ceiling < 1:
        raise ValueError(
            f"a replica must be able to serve at least one request at a time, not {ceiling}"
        )
    return max(1, ceil(concurrency / ceiling - _ROUNDING))


def ceiling_of(kv_requests: int, promise_requests: int, cap: int | None) -> int:
    """Return how many requests one replica can serve at once: the smallest of three limits.

    kv_requests       number of requests that fit into its KV cache
    promise_requests  the largest batch that keeps the latency budget per token
    cap               max_concurrency of the gateway; None: no cap
    """
    return min(kv_requests, promise_requests, kv_requests if cap is None else cap)


def wait_quantile_s(load: float, service_s: float, percentile: float) -> float:
    """Return the wait before a prefill, in seconds, that `percentile` percent of requests stay
    within.

    load       share of time in which the server is busy, 0 to 1
    service_s  seconds of one prefill

    The queue has Poisson arrivals and equal service times. The mean wait follows from the
    Pollaczek-Khinchine formula. Waits above zero are assumed to be exponential, which is accurate
    from the 80th percentile on. The result is inf for a load of 1 or more.
    """
    if load >= 1:
        return inf
    idle = 1 - percentile / 100
    if load <= idle:
        return 0.0
    mean_s = load * service_s / (2 * (1 - load))
    return mean_s / load * log(load / idle)


def replicas_for_wait(load: float, service_s: float, percentile: float, wait_s: float) -> int:
    """Return the least number of replicas that keeps a percentile of waits within `wait_s`.

    load        mean number of busy replicas
    service_s   seconds of one prefill
    percentile  the percentile, above 0 and below 100

    Raises ValueError if `wait_s` is negative, or if not even idle replicas stay within it.
    """
    if wait_s < 0:
        raise ValueError(f"the allowed wait must be 0 s or more, not {wait_s} s")
    count = max(1, ceil(load))
    for _ in range(_MAX_STEPS):
        if wait_quantile_s(load / count, service_s, percentile) <= wait_s:
            return count
        count += max(1, count // 16)
    raise ValueError(
        f"no number of replicas keeps waits within {wait_s} s for a mean of {load} requests in "
        "progress"
    )

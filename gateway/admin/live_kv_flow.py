"""KV transfers in the live view: handoffs between prefill and decode endpoints, and their bytes.

KV caches do not pass through the gateway. Some decode engines, such as vLLM, report the bytes that
they have received. These are divided among the prefill endpoints by the prompt tokens transferred.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from gateway.admin.live_fleet_status import FleetStatus
from gateway.admin.live_metric_samples import MetricSample, rate_function
from gateway.metrics.quantile_sketch import round_seconds

PairNames = tuple[str, str]
NO_HANDOFFS = (0, 0, 0)


def kv_flow(fleet: FleetStatus, now: MetricSample, earlier: MetricSample) -> dict[str, Any]:
    """Return the rates of KV cache transfers between two metric samples, for the live view.

    The result is JSON-compatible. It has the handoffs (transfers for one request) per second of
    every pair of endpoints, and the KV bytes per second by transport. A value that the engines do
    not report is None.

    fleet    the state of the gateway, with its endpoints
    now      the newer sample
    earlier  the older sample
    """
    per_s, moved = rate_function(now, earlier), kv_bytes_by_pair(now, earlier)
    transports: defaultdict[str, float] = defaultdict(float)
    pairs = []
    for pair, status in sorted(fleet.pairs.items()):
        served, failed, _ = earlier.pairs.get(pair, NO_HANDOFFS)
        kv_bytes = moved.get(pair)
        if kv_bytes is not None and status.transport is not None:
            transports[status.transport] += kv_bytes
        pairs.append(
            {
                "prefill": pair[0],
                "decode": pair[1],
                "per_s": per_s(status.served - served),
                "failed_per_s": per_s(status.failed - failed),
                "served": status.served,
                "failed": status.failed,
                "mean_s": round_seconds(status.mean_s),
                "p95_s": round_seconds(status.p95_s),
                "transport": status.transport,
                "kv_bytes_per_s": None if kv_bytes is None else per_s(kv_bytes),
            }
        )
    by_transport = {name: per_s(kv_bytes) for name, kv_bytes in sorted(transports.items())}
    return {
        "pairs": pairs,
        "under_way": fleet.handoffs_in_progress,
        "kv_bytes_per_s": by_transport,
    }


def kv_bytes_by_pair(now: MetricSample, earlier: MetricSample) -> dict[PairNames, float]:
    """Return the KV bytes transferred between two samples, by (prefill, decode) endpoint.

    The bytes that a decode endpoint has received are divided by the prompt tokens that came from
    each prefill endpoint. Decode endpoints that do not report bytes are left out.
    """
    growth = counter_growth_by_name(now.received, earlier.received)
    tokens = {
        names: counts[2] - earlier.pairs.get(names, NO_HANDOFFS)[2]
        for names, counts in now.pairs.items()
    }
    of_decoder: Counter[str] = Counter()
    for (_, decode), count in tokens.items():
        of_decoder[decode] += count
    return {
        (prefill, decode): growth[decode] * count / of_decoder[decode] if count else 0.0
        for (prefill, decode), count in tokens.items()
        if decode in growth
    }


def counter_growth_by_name(now: Mapping[str, int], earlier: Mapping[str, int]) -> dict[str, int]:
    """Return by how much each byte counter has grown between two samples.

    A counter that has fallen was reset by a restart of its engine, so it counts from 0. The growth
    of a new counter is 0, because its earlier value is unknown.
    """
    return {
        name: value - before if value >= (before := earlier.get(name, value)) else value
        for name, value in now.items()
    }

"""The state that the live view shows: the configuration, pools, endpoints and KV handoffs.

A live view is built from a FleetStatus and a sample of the metrics. Each gateway process makes
both; with several workers, the supervisor merges them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.admin.endpoints_page import endpoint_state, in_turns
from gateway.fleet.speed_monitor import describe_slowness

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface
    from gateway.fleet.live_endpoint import LiveEndpoint

VERSIONS_SHOWN = 6
HIDDEN_LABELS = frozenset({"chaos"})


class PairStatus(msgspec.Struct, frozen=True):
    """Statistics of KV transfers from one prefill to one decode endpoint, for the live view.

    `newest_s` has the durations of the most recent transfers in seconds, of all worker processes.
    """

    served: int
    failed: int
    mean_s: float | None
    newest_s: tuple[float, ...]
    transport: str | None

    @property
    def p95_s(self) -> float | None:
        """Return the 95th percentile of the newest handoff times in seconds.

        Returns None before the first handoff.
        """
        ordered = sorted(self.newest_s)
        return ordered[(len(ordered) * 19 - 1) // 20] if ordered else None


class FleetStatus(msgspec.Struct, frozen=True):
    """What a gateway's live view shows besides metrics: endpoint rows, handoffs, configuration.

    slo_by_class          latency targets (TTFT, TPOT) in seconds, by service class
    default_class         the service class of requests that name none
    endpoints             rows of the endpoints, without the values of the last minute
    handoffs_in_progress  KV transfers that have started and not ended
    active_requests       requests that are being served
    config_problem        first problem of the last configuration; None if it was accepted
    shared_state          status of state sharing with other gateways; None without it
    unlisted              error message for each configured model that no endpoint lists
    drift                 a sentence for each pool whose requests no longer resemble the workload
                          that it was sized for; with workers, the supervisor adds it
    """

    config: dict[str, Any]
    slo_by_class: dict[str, tuple[float, float]]
    default_class: str
    pools: list[dict[str, Any]]
    endpoints: list[dict[str, Any]]
    pairs: dict[tuple[str, str], PairStatus]
    handoffs_in_progress: int
    active_requests: int
    config_problem: str | None
    shared_state: dict[str, Any] | None = None
    unlisted: dict[str, str] = {}
    drift: tuple[str, ...] = ()


async def fleet_status(target: GatewayInterface, now: float) -> FleetStatus:
    """Return the state of the gateway at the monotonic time `now`.

    The rows of the endpoints are built over several event loop iterations, so that requests are not
    delayed.
    """
    rows = await in_turns(
        target.gateway.endpoints.all(),
        lambda live: _static_row(live) | _load_row(live, now) | _cache_row(target, live, now),
    )
    slos = target.gateway.snapshot.config.slo
    handoffs = target.gateway.handoffs
    error = target.reloader.last_error
    return FleetStatus(
        config=_config(target),
        slo_by_class={name: (promise.ttft, promise.tpot) for name, promise in slos.classes.items()},
        default_class=slos.default,
        pools=_pools(target),
        endpoints=rows,
        pairs={
            names: PairStatus(
                pair.served, pair.failed, pair.handoff_s, tuple(pair.newest_s), pair.transport
            )
            for names, pair in handoffs.pairs.items()
        },
        handoffs_in_progress=handoffs.live_count,
        active_requests=target.gateway.gate.active_requests,
        config_problem=None if error is None else str(error.problems[0]),
        shared_state=target.shared_state(),
        unlisted=dict(target.gateway.snapshot.unlisted),
        drift=() if target.drift is None else target.drift.sentences(),
    )


def _config(target: GatewayInterface) -> dict[str, Any]:
    reloader = target.reloader
    error = reloader.last_error
    newest_first = list(reversed(reloader.history.all()))[:VERSIONS_SHOWN]
    return {
        "version": reloader.version.number,
        "hash": reloader.version.hash,
        "needs_restart": list(reloader.needs_restart),
        "rejected": None if error is None else [str(problem) for problem in error.problems][:3],
        "draining": target.is_draining,
        "versions": [
            {
                "version": version.number,
                "at": datetime.fromtimestamp(version.at, UTC).isoformat(timespec="seconds"),
                "source": version.trigger,
                "hash": version.hash,
                "changes": [str(change) for change in version.changes][:4],
            }
            for version in newest_first
        ],
    }


def _pools(target: GatewayInterface) -> list[dict[str, Any]]:
    snapshot = target.gateway.snapshot
    queues = {queue.name: queue for queue in target.gateway.gate.pool_queues()}
    rows = []
    for name, pool in snapshot.config.pools.items():
        queue = queues.get(name)
        rows.append(
            {
                "name": name,
                "policy": pool.policy.name,
                "admission": pool.admission.name,
                "models": sorted(
                    {route.name for route in snapshot.routes.values() if route.pool == name}
                ),
                "in_flight": queue.in_flight if queue is not None else 0,
                "waiting": queue.queue_length if queue is not None else 0,
                "price": round(queue.price, 4) if queue is not None else 0.0,
            }
        )
    return rows


def _static_row(live: LiveEndpoint) -> dict[str, Any]:
    endpoint, layout = live.endpoint, live.endpoint.layout
    sizes = [
        f"{name}{size}" for name in ("tp", "pp", "ep", "dp") if (size := getattr(layout, name)) > 1
    ]
    return {
        "name": endpoint.name,
        "url": endpoint.url,
        "pool": endpoint.pool,
        "role": str(endpoint.role),
        "engine": str(endpoint.engine),
        "layout": " ".join(sizes) or "tp1",
        "labels": {
            name: value for name, value in endpoint.labels.items() if name not in HIDDEN_LABELS
        },
        "max_concurrency": endpoint.max_concurrency,
    }


def _load_row(live: LiveEndpoint, now: float) -> dict[str, Any]:
    load, health = live.load, live.health
    return {
        "state": endpoint_state(live),
        "cause": live.cause,
        "slow": None if live.speed.slowness is None else describe_slowness(live.speed.slowness),
        "since_s": round(now - health.since, 1) if health.since else None,
        "available": load.is_available,
        "silence_s": round(live.upstream.silence_duration_s(now), 2),
        "scrape_age_s": None if load.scraped_at is None else round(now - load.scraped_at, 1),
        "in_flight": load.in_flight,
        "waiting": load.waiting,
        "kv": None if load.kv_usage is None else round(load.kv_usage, 4),
        "backlog_tokens": load.prefill_tokens,
        "backlog_s": round(max(0.0, load.prefill_done_at - now), 3),
    }


def _cache_row(target: GatewayInterface, live: LiveEndpoint, now: float) -> dict[str, Any]:
    # Return how well the endpoint's prefix cache is known; nothing without KV events.
    known = target.gateway.endpoints.prefixes.exact.describe(live.load.slot, now)
    return {} if known is None else {"prefix_cache": known}

"""How a gateway stands at one moment: its configuration, pools, endpoints and pairs, as plain values.

With a note of the meters (gateway/admin/metric_samples.py) it is all that a view is made of (gateway/admin/live_view.py), whoever makes it: the gateway itself,
or the supervisor of several.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.fleet.speed_monitor import describe

if TYPE_CHECKING:
    from gateway.fleet.endpoint_registry import LiveEndpoint
    from gateway.live.target import AdminTarget

VERSIONS_SHOWN = 6
HIDDEN_LABELS = frozenset({"chaos"})
DRAINED = frozenset({"draining", "drained"})
"""States of endpoints that an operator drained by hand."""


class Pair(msgspec.Struct, frozen=True):
    """Handoffs from a prefill to a decode endpoint: how many went well or did not, how long they took, and by what.

    newest_s   seconds that each of the newest handoffs took, of all workers
    """

    served: int
    failed: int
    mean_s: float | None
    newest_s: tuple[float, ...]
    transport: str | None

    @property
    def p95_s(self) -> float | None:
        """The 95th percentile of the newest handoffs; None before the first."""
        ordered = sorted(self.newest_s)
        return ordered[(len(ordered) * 19 - 1) // 20] if ordered else None


class Standing(msgspec.Struct, frozen=True):
    """What no note tells. Rows are as the view shows them, endpoints' without the last minute.

    promises   times to first token and per further token by service class; `standard` is the class of who names none
    streams    requests that are served now            under_way  handoffs
    refused    what is wrong with the configuration that was refused last
    shared     the view shared with other gateways (Pump.state); None: there is none
    unlisted   by name, why a configured model is not served: no endpoint lists it
    """

    config: dict[str, Any]
    promises: dict[str, tuple[float, float]]
    standard: str
    pools: list[dict[str, Any]]
    endpoints: list[dict[str, Any]]
    pairs: dict[tuple[str, str], Pair]
    under_way: int
    streams: int
    refused: str | None
    shared: dict[str, Any] | None = None
    unlisted: dict[str, str] = {}


def stand(target: AdminTarget, now: float) -> Standing:
    """As it is."""
    slos, handoffs, error = target.gateway.snapshot.config.slo, target.gateway.handoffs, target.reloader.last_error
    return Standing(
        config=_config(target),
        promises={name: (promise.ttft, promise.tpot) for name, promise in slos.classes.items()},
        standard=slos.default,
        pools=_pools(target),
        endpoints=[_facts(live) | _numbers(live, now) for live in target.gateway.endpoints.all()],
        pairs={
            names: Pair(each.served, each.failed, each.handoff_s, tuple(each.newest_s), each.transport)
            for names, each in handoffs.pairs.items()
        },
        under_way=handoffs.under_way,
        streams=target.gateway.gate.active,
        refused=None if error is None else str(error.problems[0]),
        shared=target.shared_state(),
        unlisted=dict(target.gateway.snapshot.unlisted),
    )


def _config(target: AdminTarget) -> dict[str, Any]:
    reloader = target.reloader
    error = reloader.last_error
    newest_first = list(reversed(reloader.versions.all()))[:VERSIONS_SHOWN]
    return {
        "version": reloader.version.number,
        "hash": reloader.version.hash,
        "needs_restart": list(reloader.needs_restart),
        "rejected": None if error is None else [str(problem) for problem in error.problems][:3],
        "draining": target.draining,
        "versions": [
            {
                "version": each.number,
                "at": datetime.fromtimestamp(each.at, UTC).isoformat(timespec="seconds"),
                "source": each.trigger,
                "hash": each.hash,
                "changes": [str(change) for change in each.changes][:4],
            }
            for each in newest_first
        ],
    }


def _pools(target: AdminTarget) -> list[dict[str, Any]]:
    snapshot = target.gateway.snapshot
    rooms = {room.name: room for room in target.gateway.gate.rooms()}
    shown = []
    for name, pool in snapshot.config.pools.items():
        room = rooms.get(name)
        shown.append(
            {
                "name": name,
                "policy": pool.policy.name,
                "admission": pool.admission.name,
                "models": sorted({route.name for route in snapshot.routes.values() if route.pool == name}),
                "in_flight": room.in_flight if room is not None else 0,
                "waiting": room.waiting if room is not None else 0,
                "price": round(room.price, 4) if room is not None else 0.0,
            }
        )
    return shown


def _facts(live: LiveEndpoint) -> dict[str, Any]:
    endpoint, layout = live.endpoint, live.endpoint.layout
    sizes = [f"{name}{size}" for name in ("tp", "pp", "ep", "dp") if (size := getattr(layout, name)) > 1]
    return {
        "name": endpoint.name,
        "url": endpoint.url,
        "pool": endpoint.pool,
        "role": str(endpoint.role),
        "engine": str(endpoint.engine),
        "layout": " ".join(sizes) or "tp1",
        "labels": {name: value for name, value in endpoint.labels.items() if name not in HIDDEN_LABELS},
        "max_concurrency": endpoint.max_concurrency,
    }


def _numbers(live: LiveEndpoint, now: float) -> dict[str, Any]:
    load, health = live.load, live.health
    return {
        "state": state_of(live),
        "cause": None if health.cause is None else str(health.cause),
        "slow": None if live.speed.slowness is None else describe(live.speed.slowness),
        "since_s": round(now - health.since, 1) if health.since else None,
        "available": load.available,
        "silence_s": round(live.upstream.silence_s(now), 2),
        "scrape_age_s": None if load.scraped_at is None else round(now - load.scraped_at, 1),
        "in_flight": load.in_flight,
        "waiting": load.waiting,
        "kv": None if load.kv_usage is None else round(load.kv_usage, 4),
        "backlog_tokens": load.prefill_tokens,
        "backlog_s": round(max(0.0, load.ready_at - now), 3),
    }


def state_of(live: LiveEndpoint) -> str:
    """leaving, draining, drained, or health's word: up, returning, ejected, dead."""
    if live.leaving:
        return "leaving"
    if live.drained and live.load.in_flight:
        return "draining"
    return "drained" if live.drained else str(live.health.state)

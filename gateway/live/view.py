"""The live view as one plain value: what the page, `penstock top` and a script see. docs/live-page.md names its parts.

Lives here: which numbers, over which span. Not here: notes and arithmetic (marks.py), pairs (flow.py), words (why.py).
Rates are of the last ten seconds, percentiles and shares of the last minute. What nobody knows is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from time import time
from typing import TYPE_CHECKING, Any

from gateway.live import why
from gateway.live.flow import flow
from gateway.live.marks import Counts, Mark, Marks, Step, failed, grown, merged, quantile, rate, rise, rounded
from gateway.metrics import TPOT_BUCKETS_S, TTFT_BUCKETS_S

if TYPE_CHECKING:
    from gateway.app import App
    from gateway.roster import LiveEndpoint

RATES_S, SHARES_S, SPARK_S = 10.0, 60.0, 60
VERSIONS_SHOWN = 6
HIDDEN_LABELS = frozenset({"chaos"})


def view(app: App, marks: Marks, now: Mark) -> dict[str, Any]:
    """Everything, as of `now`."""
    soon, minute = marks.before(now.at, RATES_S) or now, marks.before(now.at, SHARES_S) or now
    endpoints = _endpoints(app, marks, now, minute)
    return {
        "at": round(time(), 3),
        "span_s": {"rates": round(now.at - soon.at, 3), "shares": round(now.at - minute.at, 3)},
        "config": _config(app),
        "totals": _totals(app, now, soon, minute),
        "pools": _pools(app),
        "endpoints": endpoints,
        "flow": flow(app.gateway.handoffs, now, soon),
        "why": [_reason(each) for each in why.reasons(_minute(app, now, minute, endpoints))],
        "history": _history(marks.steps(now), now.at),
    }


def _reason(reason: why.Reason) -> dict[str, Any]:
    return {"grade": reason.grade, "text": reason.text, "endpoint": reason.endpoint}


def _config(app: App) -> dict[str, Any]:
    reloader = app.reloader
    error = reloader.last_error
    newest_first = list(reversed(reloader.versions.all()))[:VERSIONS_SHOWN]
    return {
        "version": reloader.version.number,
        "hash": reloader.version.hash,
        "needs_restart": list(reloader.needs_restart),
        "rejected": None if error is None else [str(problem) for problem in error.problems][:3],
        "draining": app.draining,
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


def _totals(app: App, now: Mark, soon: Mark, minute: Mark) -> dict[str, Any]:
    slos = app.gateway.snapshot.config.slo
    promise = slos.classes[slos.default]
    answers, per_s = rise(now.answers, soon.answers), rate(now, soon)
    sent, hit = _believed(now, minute, now.believed)
    prompt, cached = (new - old for new, old in zip(now.engine, minute.engine, strict=True))
    return {
        "requests_per_s": per_s(sum(answers.values())),
        "errors_per_s": per_s(failed(answers)),
        "tokens_per_s": per_s(now.tokens - soon.tokens),
        "shed_per_s": {reason: per_s(count) for reason, count in rise(now.shed, soon.shed).most_common()},
        "streams": app.gateway.gate.active,
        "waiting": sum(room.waiting for room in app.gateway.gate.rooms()),
        "goodput": _goodput(app, now, minute),
        "ttft": _percentiles(TTFT_BUCKETS_S, now.ttft, minute.ttft, promise.ttft),
        "tpot": _percentiles(TPOT_BUCKETS_S, now.tpot, minute.tpot, promise.tpot),
        "slo": slos.default,
        "prefix_hit": _ratio(hit, sent),
        "engine_hit": _ratio(cached, prompt),
        "since_start": {
            "requests": int(sum(now.answers.values())),
            "failed": int(failed(now.answers)),
            "refused": int(sum(now.shed.values())),
            "retries": int(sum(now.retries.values())),
        },
    }


def _goodput(app: App, now: Mark, minute: Mark) -> list[dict[str, Any]]:
    """By service class; a class that had no request is left out."""
    ended, classes = rise(now.kept, minute.kept), app.gateway.snapshot.config.slo.classes
    shown = []
    for name in sorted({key[0] for key in ended}):
        outcomes = {kept: count for (each, kept), count in ended.items() if each == name}
        promise = classes.get(name)
        shown.append(
            {
                "class": name,
                "ratio": _ratio(outcomes.get("met", 0.0), sum(outcomes.values())),
                "outcomes": outcomes,
                "ttft_s": None if promise is None else promise.ttft,
                "tpot_s": None if promise is None else promise.tpot,
            }
        )
    return shown


def _pools(app: App) -> list[dict[str, Any]]:
    snapshot = app.gateway.snapshot
    rooms = {room.name: room for room in app.gateway.gate.rooms()}
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


def _endpoints(app: App, marks: Marks, now: Mark, minute: Mark) -> list[dict[str, Any]]:
    sparks = _sparks([*marks, now], now.at)
    return [
        _facts(live) | _numbers(live, now.at) | _minute_of(live.endpoint.name, now, minute)
        | {"spark": sparks.get(live.endpoint.name, [])}
        for live in app.gateway.endpoints.all()
    ]  # fmt: skip


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


def _minute_of(name: str, now: Mark, minute: Mark) -> dict[str, Any]:
    ttft = grown(now.ttft.get(name, ()), minute.ttft.get(name, ()))
    tpot = grown(now.tpot.get(name, ()), minute.tpot.get(name, ()))
    sent, hit = _believed(now, minute, (name,))
    return {
        "hit": _ratio(hit, sent),
        "served": sum(ttft),
        "ttft_p50_s": rounded(quantile(TTFT_BUCKETS_S, ttft, 0.5)),
        "ttft_p95_s": rounded(quantile(TTFT_BUCKETS_S, ttft, 0.95)),
        "tpot_p50_s": rounded(quantile(TPOT_BUCKETS_S, tpot, 0.5)),
        "tpot_p95_s": rounded(quantile(TPOT_BUCKETS_S, tpot, 0.95)),
    }


def _sparks(marks: Sequence[Mark], now: float) -> dict[str, list[int]]:
    """Requests in flight, a number for each second of the last minute; what was not noted repeats what was."""
    moments: list[Mark | None] = [None] * SPARK_S
    for mark in marks:
        at = SPARK_S - 1 - int(now - mark.at)
        if 0 <= at < SPARK_S:
            moments[at] = mark
    found: dict[str, list[int]] = {name: [] for name in marks[-1].in_flight}
    last: Mark | None = None
    for moment in moments:
        last = moment or last
        for name, line in found.items():
            line.append(0 if last is None else last.in_flight.get(name, 0))
    return found


def _minute(app: App, now: Mark, minute: Mark, endpoints: Sequence[Mapping[str, Any]]) -> why.Minute:
    ended, decisions = rise(now.kept, minute.kept), rise(now.decisions, minute.decisions)
    missed: dict[str, float] = {}
    for (_, kept), count in ended.items():
        missed[kept] = missed.get(kept, 0.0) + count
    error = app.reloader.last_error
    return why.Minute(
        endpoints=endpoints,
        span_s=now.at - minute.at,
        shed=rise(now.shed, minute.shed),
        retries=rise(now.retries, minute.retries),
        missed=missed,
        promised=sum(missed.values()),
        computed=rise(now.computed, minute.computed),
        whole={reason: count for (kind, reason), count in decisions.items() if kind == "whole"},
        split=sum(count for (kind, _), count in decisions.items() if kind == "split"),
        prices={room.name: room.price for room in app.gateway.gate.rooms()},
        waiting={room.name: room.waiting for room in app.gateway.gate.rooms()},
        refused=None if error is None else str(error.problems[0]),
    )


def _history(steps: Sequence[Step], now: float) -> dict[str, list[float | None]]:
    """Lines for charts; `ago_s` says where on them, in seconds, negative."""
    return {
        "ago_s": [round(each.at - now, 2) for each in steps],
        "requests_per_s": [round(each.requests_per_s, 2) for each in steps],
        "shed_per_s": [round(each.shed_per_s, 2) for each in steps],
        "errors_per_s": [round(each.errors_per_s, 2) for each in steps],
        "tokens_per_s": [round(each.tokens_per_s, 1) for each in steps],
        "ttft_p95_s": [rounded(each.ttft_p95_s) for each in steps],
    }


def _percentiles(
    bounds: Sequence[float], now: Mapping[str, Counts], before: Mapping[str, Counts], budget_s: float
) -> dict[str, Any]:
    counts = merged([grown(found, before.get(name, ())) for name, found in now.items()])
    shown: dict[str, Any] = {f"p{share}_s": rounded(quantile(bounds, counts, share / 100)) for share in (50, 95, 99)}
    return shown | {"budget_s": budget_s, "count": sum(counts)}


def _believed(now: Mark, minute: Mark, names: Sequence[str] | Mapping[str, Any]) -> tuple[int, int]:
    """Prompt tokens sent to these endpoints since then, and those of them believed to be cached."""
    sent = hit = 0
    for name in names:
        after, before = now.believed.get(name, (0, 0)), minute.believed.get(name, (0, 0))
        sent += max(0, after[0] - before[0])
        hit += max(0, after[1] - before[1])
    return sent, hit


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None

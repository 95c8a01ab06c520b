"""The live view of several workers: merges their metric samples and their status.

Quantile sketches are merged, so that percentiles cover all observations. The content of the view is
built in admin/live_view.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

import msgspec

from gateway.admin.live_fleet_status import FleetStatus, PairStatus
from gateway.admin.live_metric_samples import MetricSample
from gateway.admin.live_pages import WorkerSample
from gateway.metrics.quantile_sketch import BucketCounts, merge_counts
from gateway.workers.worker_process import REQUEST_ERRORS, Worker

SAMPLE_TIMEOUT_S = 2.0
MAX_FIELDS = ("in_flight", "backlog_tokens", "backlog_s")
"""Fields of an endpoint that every worker knows completely; the highest value is used, because some
workers learn of a change a moment later.
"""
STATE_FIELDS = ("state", "cause", "slow", "since_s", "available")

Key = TypeVar("Key")
Row = TypeVar("Row")
Value = TypeVar("Value")
_decoder = msgspec.msgpack.Decoder(WorkerSample)


class LiveViewMerger:
    """Merges the metric samples of the serving `workers`.

    It keeps the sums of workers that have ended, so that no total ever falls.
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[Worker]],
        drift: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """Create the merger. `drift` returns the supervisor's sentences about workload drift."""
        self._workers, self._drift = workers, drift
        self._last: dict[Worker, MetricSample] = {}
        self._ended: MetricSample | None = None

    async def take_sample(self, before: MetricSample | None) -> WorkerSample:
        """Return the merged metric sample and status of all workers.

        Raises LookupError if no worker responds.
        """
        workers = self._workers()
        responses = [
            response
            for response in await asyncio.gather(*map(_fetch, workers))
            if response is not None
        ]
        if not responses:
            raise LookupError("none of the worker processes answered a request for its status")
        status = merge_statuses([status for _, (_, status) in responses])
        self._last |= {worker: sample for worker, (sample, _) in responses}
        for worker in self._last.keys() - set(workers):
            self._ended = _without_removed_endpoints(
                sum_samples([*self._ended_samples(), self._last.pop(worker)]),
                {row["name"] for row in status.endpoints},
            )
        now = msgspec.structs.replace(
            sum_samples([*self._ended_samples(), *self._last.values()]),
            at=monotonic(),
            in_flight=_largest(sample.in_flight for _, (sample, _) in responses),
            received=_largest(sample.received for _, (sample, _) in responses),
        )
        return (
            now if before is None else _share_unchanged(now, before),
            msgspec.structs.replace(status, drift=self._drift()),
        )

    def _ended_samples(self) -> list[MetricSample]:
        return [] if self._ended is None else [self._ended]


async def _fetch(worker: Worker) -> tuple[Worker, WorkerSample] | None:
    try:
        response = await worker.request("GET", "/live/note", timeout_s=SAMPLE_TIMEOUT_S)
        return (worker, _decoder.decode(response.body)) if response.status == 200 else None
    except (*REQUEST_ERRORS, msgspec.DecodeError):
        return None


def sum_samples(samples: Sequence[MetricSample]) -> MetricSample:
    """Return the sum of several workers' metric samples, with the time of the last one.

    Values that are not sums stay empty.
    """
    names = (
        *("responses", "shed", "slo_outcomes", "retries", "upstream_errors"),
        *("computed_tokens", "split_decisions", "costs"),
    )
    counts: dict[str, Any] = {
        name: _summed(getattr(sample, name) for sample in samples) for name in names
    }
    rows: dict[str, Any] = {
        **{
            name: _by_key(merge_counts, (getattr(sample, name) for sample in samples))
            for name in ("ttft", "tpot")
        },
        **{
            name: _by_key(_columns, (getattr(sample, name) for sample in samples))
            for name in ("predicted_tokens", "pairs")
        },
    }
    prompt, cached = (
        sum(part) for part in zip(*(sample.engine for sample in samples), strict=True)
    )
    tokens = sum(sample.tokens for sample in samples)
    return MetricSample(
        at=samples[-1].at,
        tokens=tokens,
        engine=(prompt, cached),
        in_flight={},
        received={},
        **counts,
        **rows,
    )


def _without_removed_endpoints(sample: MetricSample, names: set[str]) -> MetricSample:
    # Return the sample of ended workers without the endpoints that no worker has any more, which
    # would stay for as long as the supervisor lives.
    return msgspec.structs.replace(
        sample,
        upstream_errors={
            key: count for key, count in sample.upstream_errors.items() if key[0] in names
        },
        pairs={key: counts for key, counts in sample.pairs.items() if names.issuperset(key)},
        ttft=_only(names, sample.ttft),
        tpot=_only(names, sample.tpot),
        predicted_tokens=_only(names, sample.predicted_tokens),
    )


def _only(names: set[str], by_name: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in by_name.items() if name in names}


def merge_statuses(statuses: Sequence[FleetStatus]) -> FleetStatus:
    """Return the merged status of all workers. Values that they share come from the oldest one."""
    return msgspec.structs.replace(
        statuses[0],
        pools=_pools(statuses),
        endpoints=_endpoints(statuses),
        pairs=_pairs(statuses),
        handoffs_in_progress=sum(status.handoffs_in_progress for status in statuses),
        active_requests=sum(status.active_requests for status in statuses),
        shared_state=_shared(statuses),
        unlisted={
            name: message for status in statuses for name, message in status.unlisted.items()
        },
        config_problem=next(
            (status.config_problem for status in statuses if status.config_problem is not None),
            None,
        ),
    )


def _shared(statuses: Sequence[FleetStatus]) -> dict[str, Any] | None:
    known = [status.shared_state for status in statuses if status.shared_state is not None]
    return next((status for status in known if status["problem"]), known[0] if known else None)


def _pools(statuses: Sequence[FleetStatus]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for status in statuses for row in status.pools):
        merged = rows.setdefault(row["name"], row)
        if merged is not row:
            for name in ("in_flight", "waiting"):
                merged[name] += row[name]
            merged["price"] = max(merged["price"], row["price"])
    return list(rows.values())


def _endpoints(statuses: Sequence[FleetStatus]) -> list[dict[str, Any]]:
    # Merge the endpoints' rows; one is unavailable if any worker reports it as unavailable, and one
    # that takes requests is slow if any worker says so.
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for status in statuses for row in status.endpoints):
        merged = rows.setdefault((row["pool"], row["url"]), row)
        if merged is not row:
            merged |= {name: max(merged[name], row[name]) for name in MAX_FIELDS}
            merged["silence_s"] = min(merged["silence_s"], row["silence_s"])
            if merged["available"] and not row["available"]:
                merged |= {name: row[name] for name in STATE_FIELDS}
            elif merged["available"]:
                merged["slow"] = merged["slow"] or row["slow"]
    return list(rows.values())


def _pairs(statuses: Sequence[FleetStatus]) -> dict[tuple[str, str], PairStatus]:
    merged: dict[tuple[str, str], PairStatus] = {}
    for names, pair in ((names, pair) for part in statuses for names, pair in part.pairs.items()):
        existing = merged.get(names)
        if existing is None:
            merged[names] = pair
            continue
        served = existing.served + pair.served
        known = [(part.mean_s, part.served) for part in (existing, pair) if part.mean_s is not None]
        whole = sum(count for _, count in known)
        merged[names] = PairStatus(
            served,
            existing.failed + pair.failed,
            sum(mean_s * count for mean_s, count in known) / whole if whole else None,
            existing.newest_s + pair.newest_s,
            existing.transport or pair.transport,
        )
    return merged


def _share_unchanged(now: MetricSample, before: MetricSample) -> MetricSample:
    def shared(
        after: Mapping[str, BucketCounts], old: Mapping[str, BucketCounts]
    ) -> dict[str, BucketCounts]:
        return {
            name: old[name] if old.get(name) == counts else counts for name, counts in after.items()
        }

    return msgspec.structs.replace(
        now, ttft=shared(now.ttft, before.ttft), tpot=shared(now.tpot, before.tpot)
    )


def _summed(parts: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    total: dict[Key, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _by_key(add: Callable[[list[Row]], Row], parts: Iterable[Mapping[Key, Row]]) -> dict[Key, Row]:
    rows: dict[Key, list[Row]] = {}
    for part in parts:
        for key, row in part.items():
            rows.setdefault(key, []).append(row)
    return {key: add(values) for key, values in rows.items()}


def _columns(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))


def _largest(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    largest: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            largest[name] = max(value, largest.get(name, 0))
    return largest

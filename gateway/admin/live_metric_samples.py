"""Samples of a gateway's metrics over the last minute, and the differences between two samples.

A sample is a copy of counters. Rates, percentiles and sparklines are computed from the difference
between two samples. live_view.py shows them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from gateway.metrics.metric_types import Counter as Count
from gateway.metrics.metric_types import Histogram, MetricFamily
from gateway.metrics.quantile_sketch import EMPTY, BucketCounts, difference, merge_counts, quantile
from gateway.reload.auto_rollback import is_failure
from gateway.util.work_in_turns import Steps, WorkMeter, run_at_once

if TYPE_CHECKING:
    from gateway.admin.gateway_interface import GatewayInterface

HISTORY_S = 61.0
MIN_SPACING_S = 0.95

SKETCH_ITEMS = 4
"""Items of a WorkMeter as which a quantile sketch counts."""

Key = TypeVar("Key")


class MetricSample(msgspec.Struct, frozen=True, eq=False):
    """A gateway's metrics at one monotonic time. Most are counters since the gateway's start.

    responses         responses by (HTTP status, reason)
    slo_outcomes      responses by (service class, outcome such as "met" or "ttft_missed")
    upstream_errors   errors by (endpoint, kind)
    computed_tokens   prompt tokens that engines computed, by cause
    split_decisions   decisions by (split, whole or pull; reason)
    tokens            output tokens of finished responses
    engine            prompt tokens of finished responses, and those reported as cached
    ttft              bucket counts of the quantile sketch of TTFT, by endpoint
    tpot              bucket counts of the quantile sketch of TPOT, by endpoint
    in_flight         requests in flight now, by endpoint
    predicted_tokens  by endpoint: prompt tokens sent, and those predicted to be cached
    pairs             by (prefill, decode) endpoint: handoffs served, handoffs failed, and prompt
                      tokens transferred
    costs             dollars of requests by ("tenant", tenant), and of idle time by ("idle", pool)
    received          KV bytes received by each decode endpoint, if its engine reports them
    """

    at: float
    responses: Mapping[tuple[str, str], float]
    shed: Mapping[str, float]
    slo_outcomes: Mapping[tuple[str, str], float]
    retries: Mapping[str, float]
    upstream_errors: Mapping[tuple[str, str], float]
    computed_tokens: Mapping[str, float]
    split_decisions: Mapping[tuple[str, str], float]
    costs: Mapping[tuple[str, str], float]
    tokens: float
    engine: tuple[float, float]
    ttft: Mapping[str, BucketCounts]
    tpot: Mapping[str, BucketCounts]
    in_flight: Mapping[str, int]
    predicted_tokens: Mapping[str, tuple[int, int]]
    pairs: Mapping[tuple[str, str], tuple[int, int, int]]
    received: Mapping[str, int]


def take_sample(
    target: GatewayInterface, now: float, before: MetricSample | None = None
) -> MetricSample:
    """Return a sample of the gateway's metrics at the monotonic time `now`.

    To save memory and work, an unchanged quantile sketch shares its counts with the earlier sample
    `before`.
    """
    return run_at_once(sample_steps(target, now, before))


def sample_steps(
    target: GatewayInterface, now: float, before: MetricSample | None = None
) -> Steps[MetricSample]:
    """Do the work of take_sample() in parts: yield after each, so that requests can run."""
    metrics, gateway, meter = target.metrics, target.gateway, WorkMeter()
    ttft = yield from _sketches(metrics.ttft_seconds, before.ttft if before else {}, meter)
    tpot = yield from _sketches(metrics.tpot_seconds, before.tpot if before else {}, meter)
    in_flight, predicted_tokens, received = yield from _endpoint_figures(target, meter)
    upstream_errors = _sum_by_two_labels(metrics.upstream_errors_total, 0, 1)
    yield
    return MetricSample(
        at=now,
        responses=_sum_by_two_labels(metrics.requests_total, 1, 2),
        shed=_sum_by_label(metrics.shed_total, 0),
        slo_outcomes=_sum_by_two_labels(metrics.goodput_total, 0, 1),
        retries=_sum_by_label(metrics.retries_total, 0),
        upstream_errors=upstream_errors,
        computed_tokens=_sum_by_label(metrics.prefill_tokens_total, 0),
        split_decisions=_sum_by_two_labels(metrics.split_decisions_total, 0, 1),
        costs={
            **_with_kind("tenant", _sum_by_label(metrics.cost_usd_total, 2)),
            **_with_kind("idle", _sum_by_label(metrics.idle_cost_usd_total, 0)),
        },
        tokens=_total(metrics.completion_tokens_total),
        engine=(_total(metrics.prompt_tokens_total), _total(metrics.cached_tokens_total)),
        ttft=ttft,
        tpot=tpot,
        in_flight=in_flight,
        predicted_tokens=predicted_tokens,
        pairs={
            names: (pair.served, pair.failed, pair.tokens)
            for names, pair in gateway.handoffs.pairs.items()
        },
        received=received,
    )


def _endpoint_figures(
    target: GatewayInterface, meter: WorkMeter
) -> Steps[tuple[dict[str, int], dict[str, tuple[int, int]], dict[str, int]]]:
    # Return by endpoint: requests in flight; prompt tokens that were sent, and those of them that
    # were cached as predicted; bytes of KV that it has received.
    in_flight: dict[str, int] = {}
    predicted_tokens: dict[str, tuple[int, int]] = {}
    received: dict[str, int] = {}
    for live in target.gateway.endpoints.all():
        name = live.endpoint.name
        in_flight[name] = live.load.in_flight
        predicted_tokens[name] = live.sent_tokens, live.hit_tokens
        if live.kv_received_bytes is not None:
            received[name] = live.kv_received_bytes
        if meter.is_part_over():
            yield
    return in_flight, predicted_tokens, received


def _with_kind(kind: str, sums: Mapping[str, float]) -> dict[tuple[str, str], float]:
    return {(kind, name): value for name, value in sums.items()}


class SampleDifference(msgspec.Struct, frozen=True):
    """What happened between two samples: rates per second, and the 95th percentile of TTFT.

    at          monotonic time of the later sample
    ttft_p95_s  95th percentile of the TTFT of requests between the samples; None without requests
    """

    at: float
    requests_per_s: float
    shed_per_s: float
    errors_per_s: float
    tokens_per_s: float
    ttft_p95_s: float | None


class SketchGrowth(NamedTuple):
    """The latencies that were observed between two metric samples.

    A quantile sketch counts latencies in buckets, and percentiles are computed from the counts.
    This class has the differences of the counts.

    ttft  by endpoint and bucket: number of new times to first token; endpoints without new ones are
          left out
    tpot  the same for the times per output token
    """

    ttft: dict[str, dict[int, int]]
    tpot: dict[str, dict[int, int]]


def sketch_growth(before: MetricSample, after: MetricSample) -> SketchGrowth:
    """Return the latencies that were observed between two metric samples.

    Both samples must still have their quantile sketches (the bucket counts from which percentiles
    are computed).
    """
    return run_at_once(_growth_steps(before, after))


def _growth_steps(before: MetricSample, after: MetricSample) -> Steps[SketchGrowth]:
    meter = WorkMeter()
    ttft = yield from _grown(before.ttft, after.ttft, meter)
    tpot = yield from _grown(before.tpot, after.tpot, meter)
    return SketchGrowth(ttft, tpot)


def _grown(
    before: Mapping[str, BucketCounts], after: Mapping[str, BucketCounts], meter: WorkMeter
) -> Steps[dict[str, dict[int, int]]]:
    grown = {}
    for name, counts in after.items():
        old = before.get(name, EMPTY)
        is_same = old is counts
        if not is_same and (added := difference(counts, old)):
            grown[name] = dict(added)
        if meter.is_part_over(1 if is_same else SKETCH_ITEMS):
            yield
    return grown


def sample_difference(
    before: MetricSample, after: MetricSample, growth: SketchGrowth | None = None
) -> SampleDifference:
    """Return the request rates, and the 95th percentile of TTFT, between two metric samples.

    growth  the latencies observed between the two samples; if None, this function computes them,
            for which both samples need their quantile sketches
    """
    span_s, responses = after.at - before.at, counter_growth(after.responses, before.responses)
    ttft = merge_counts((growth or sketch_growth(before, after)).ttft.values())
    return SampleDifference(
        at=after.at,
        requests_per_s=sum(responses.values()) / span_s,
        shed_per_s=sum(counter_growth(after.shed, before.shed).values()) / span_s,
        errors_per_s=count_failed(responses) / span_s,
        tokens_per_s=(after.tokens - before.tokens) / span_s,
        ttft_p95_s=quantile(ttft, 0.95),
    )


def count_failed(responses: Mapping[tuple[str, str], float]) -> float:
    """Return how many responses have failed.

    `responses` has the number of responses by (HTTP status, reason).
    """
    return sum(count for key, count in responses.items() if is_failure(*key))


class SampleHistory:
    """The gateway's metric samples of the last minute, oldest first and about a second apart.

    It also keeps the differences between consecutive samples. To save memory, only the newest
    sample keeps its quantile sketches, which have up to 1,268 counts for each endpoint and metric.
    For all earlier samples, only the growth of the sketches is kept.

    newest  the newest metric sample, with its sketches; None before the first one
    """

    def __init__(self) -> None:
        self.newest: MetricSample | None = None
        self._ring: deque[MetricSample] = deque()
        self._steps: deque[SampleDifference] = deque()
        self._growths: deque[SketchGrowth] = deque()  # growth between each two adjacent samples
        self._sum = SketchGrowth({}, {})  # sum of all growths

    def __iter__(self) -> Iterator[MetricSample]:
        """Iterate over the samples, oldest first; their quantile sketches are left out."""
        return iter(self._ring)

    def copy(self) -> SampleHistory:
        """Return a copy of the history, which a thread can read while this one changes."""
        copied = SampleHistory()
        copied.newest, copied._ring = self.newest, self._ring.copy()
        copied._steps, copied._growths = self._steps.copy(), self._growths.copy()
        copied._sum = _copy_growth(self._sum)
        return copied

    def append(self, mark: MetricSample) -> None:
        """Append a metric sample, unless the last one is less than MIN_SPACING_S seconds old.

        Samples older than a minute are dropped.
        """
        run_at_once(self.append_steps(mark))

    def append_steps(self, mark: MetricSample) -> Steps[None]:
        """Do the work of append() in parts: yield after each, and change the history in the last.

        Call no other append() until the last part is done.
        """
        if self.newest is not None:
            if mark.at - self.newest.at < MIN_SPACING_S:
                return
            growth = yield from _growth_steps(self.newest, mark)
            self._steps.append(sample_difference(self.newest, mark, growth))
            self._growths.append(growth)
            _add_growth(self._sum, growth)
        self.newest = mark
        self._ring.append(msgspec.structs.replace(mark, ttft={}, tpot={}))
        while mark.at - self._ring[0].at > HISTORY_S:
            self._ring.popleft()
            self._steps.popleft()
            _add_growth(self._sum, self._growths.popleft(), -1)

    def growth_since(self, mark: MetricSample, now: MetricSample) -> SketchGrowth:
        """Return the latencies that were observed between the sample `mark` and the sample `now`.

        `mark` must belong to this history. If it does not, for example because the history is
        empty, the result has no latencies. `now` must have its quantile sketches.
        """
        index = next((at for at, sample in enumerate(self._ring) if sample is mark), None)
        if index is None or self.newest is None:
            return SketchGrowth({}, {})
        total = _copy_growth(self._sum)
        for growth in islice(self._growths, index):
            _add_growth(total, growth, -1)
        _add_growth(total, sketch_growth(self.newest, now))
        return total

    def differences(self, now: MetricSample) -> list[SampleDifference]:
        """Return the differences between consecutive metric samples, oldest first.

        The last one ends at the monotonic time `now`. If it would be shorter than half a second, it
        is left out, because rates over so short a time are noise.
        """
        last = self.newest
        if last is None or now.at - last.at < 0.5:
            return [*self._steps]
        return [*self._steps, sample_difference(last, now)]

    def find_before(self, at: float, span_s: float) -> MetricSample | None:
        """Return the newest sample that is at least `span_s` seconds older than the time `at`.

        If no sample is that old, return the oldest one; None if no sample is older than `at`. The
        returned sample has no quantile sketches; growth_since() returns the latencies observed
        since it was taken.
        """
        older = [mark for mark in self._ring if at - mark.at >= span_s]
        if older:
            return older[-1]
        return self._ring[0] if self._ring and self._ring[0].at < at else None


def _add_growth(total: SketchGrowth, growth: SketchGrowth, sign: int = 1) -> None:
    # Add the counts of `growth` to `total`, or subtract them with sign -1.
    #
    # The counts of an endpoint are replaced, because copies of the total refer to them.
    for sums, parts in zip(total, growth, strict=True):
        for name, counts in parts.items():
            own = dict(sums.get(name, EMPTY))
            for bucket, count in counts.items():
                value = own.get(bucket, 0) + sign * count
                if value:
                    own[bucket] = value
                else:
                    own.pop(bucket, None)
            if own:
                sums[name] = own
            else:
                sums.pop(name, None)


def _copy_growth(growth: SketchGrowth) -> SketchGrowth:
    return SketchGrowth(growth.ttft.copy(), growth.tpot.copy())


def counter_growth(after: Mapping[Key, float], before: Mapping[Key, float]) -> Counter[Key]:
    """Return by how much each counter has grown from `before` to `after`.

    Counters that have not grown are left out.
    """
    return Counter(
        {key: grown for key, value in after.items() if (grown := value - before.get(key, 0.0)) > 0}
    )


def rate_function(after: MetricSample, before: MetricSample) -> Callable[[float], float]:
    """Return a function that converts the growth of a counter to a rate per second.

    The counter grew between the metric samples `before` and `after`.
    """
    span_s = after.at - before.at
    return lambda count: round(count / span_s, 3) if span_s > 0 else 0.0


def _sum_by_label(family: MetricFamily[Count], index: int) -> dict[str, float]:
    totals: dict[str, float] = {}
    for labels, child in family.children():
        totals[labels[index]] = totals.get(labels[index], 0.0) + child.value
    return totals


def _sum_by_two_labels(
    family: MetricFamily[Count], first: int, second: int
) -> dict[tuple[str, str], float]:
    totals: dict[tuple[str, str], float] = {}
    for labels, child in family.children():
        key = labels[first], labels[second]
        totals[key] = totals.get(key, 0.0) + child.value
    return totals


def _total(family: MetricFamily[Count]) -> float:
    return sum(child.value for _, child in family.children())


def _sketches(
    family: MetricFamily[Histogram], before: Mapping[str, BucketCounts], meter: WorkMeter
) -> Steps[dict[str, BucketCounts]]:
    # Return the quantile sketches of a histogram by endpoint, summed over models.
    #
    # A sketch that has not changed is taken from `before`.
    parts: dict[str, list[BucketCounts]] = {}
    for labels, child in family.children():
        parts.setdefault(labels[1], []).append(child.sketch)
    sketches = {}
    for name, sums in parts.items():
        counts, old = merge_counts(sums), before.get(name)
        sketches[name] = old if old is not None and old == counts else counts
        if meter.is_part_over(SKETCH_ITEMS):
            yield
    return sketches

"""Notes of the meters, a minute of them: what rates, percentiles and sparklines are made of by subtraction.

Lives here: taking a note, keeping notes, and the arithmetic between two. Not here: what is shown of it (gateway/admin/live_view.py).
A note copies counts and computes nothing; one of 64 endpoints takes 0.1 ms.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gateway.metrics.metric_types import Counter as Count
from gateway.metrics.metric_types import Family, Histogram
from gateway.metrics.quantile_sketch import NONE, Counts, grown, merged, quantile
from gateway.reload.auto_rollback import is_failure

if TYPE_CHECKING:
    from gateway.live.target import AdminTarget

KEEP_S = 61.0
SPACING_S = 0.95

Key = TypeVar("Key")


class Mark(msgspec.Struct, frozen=True, eq=False):
    """The meters at one moment (monotonic seconds). Everything is a sum since the start but `in_flight`.

    answers       by status and reason                  kept      by service class and what became of the promise
    ttft, tpot    sketch counts by endpoint             tokens    output tokens of answers that are over
    believed      by endpoint: prompt tokens sent there, and those of them believed to be cached
    engine        prompt tokens of answers that are over, and those of them that engines say were cached
    computed      prompt tokens computed, by why
    pairs         handoffs by prefill and decode: served, failed, and prompt tokens whose KV travelled
    received      bytes of KV by decode endpoint, as its engine says; one that does not say is left out
    """

    at: float
    answers: Mapping[tuple[str, str], float]
    shed: Mapping[str, float]
    kept: Mapping[tuple[str, str], float]
    retries: Mapping[str, float]
    broke: Mapping[tuple[str, str], float]
    computed: Mapping[str, float]
    decisions: Mapping[tuple[str, str], float]
    tokens: float
    engine: tuple[float, float]
    ttft: Mapping[str, Counts]
    tpot: Mapping[str, Counts]
    in_flight: Mapping[str, int]
    believed: Mapping[str, tuple[int, int]]
    pairs: Mapping[tuple[str, str], tuple[int, int, int]]
    received: Mapping[str, int]


def take(target: AdminTarget, now: float, before: Mark | None = None) -> Mark:
    """The meters as they are. Sketches that stand still share their counts with the note before."""
    metrics, gateway = target.metrics, target.gateway
    live = gateway.endpoints.all()
    return Mark(
        at=now,
        answers=_sums(metrics.requests_total, 1, 2),
        shed=_by(metrics.shed_total, 0),
        kept=_sums(metrics.goodput_total, 0, 1),
        retries=_by(metrics.retries_total, 0),
        broke=_sums(metrics.upstream_errors_total, 0, 1),
        computed=_by(metrics.prefill_tokens_total, 0),
        decisions=_sums(metrics.split_decisions_total, 0, 1),
        tokens=_total(metrics.completion_tokens_total),
        engine=(_total(metrics.prompt_tokens_total), _total(metrics.cached_tokens_total)),
        ttft=_sketches(metrics.ttft_seconds, before.ttft if before is not None else {}),
        tpot=_sketches(metrics.tpot_seconds, before.tpot if before is not None else {}),
        in_flight={each.endpoint.name: each.load.in_flight for each in live},
        believed={each.endpoint.name: (each.sent_tokens, each.hit_tokens) for each in live},
        pairs={names: (pair.served, pair.failed, pair.tokens) for names, pair in gateway.handoffs.pairs.items()},
        received={each.endpoint.name: told for each in live if (told := each.kv_received_bytes) is not None},
    )


class Step(msgspec.Struct, frozen=True):
    """What happened between two notes: rates a second, and the 95th percentile of times to first token, seconds."""

    at: float
    requests_per_s: float
    shed_per_s: float
    errors_per_s: float
    tokens_per_s: float
    ttft_p95_s: float | None


def step(before: Mark, after: Mark) -> Step:
    """From one note to a later one."""
    span_s, answers = after.at - before.at, rise(after.answers, before.answers)
    changed = [(counts, before.ttft.get(name, NONE)) for name, counts in after.ttft.items()]
    ttft = merged([grown(counts, old) for counts, old in changed if counts is not old])
    return Step(
        at=after.at,
        requests_per_s=sum(answers.values()) / span_s,
        shed_per_s=sum(rise(after.shed, before.shed).values()) / span_s,
        errors_per_s=failed(answers) / span_s,
        tokens_per_s=(after.tokens - before.tokens) / span_s,
        ttft_p95_s=quantile(ttft, 0.95),
    )


def failed(answers: Mapping[tuple[str, str], float]) -> float:
    """How many of these answers, by status and reason, failed."""
    return sum(count for key, count in answers.items() if is_failure(*key))


class Marks:
    """The notes of the last minute, oldest first, a second apart or more, and the steps between. One owner: gateway/admin/live_stream.py."""

    def __init__(self) -> None:
        self._ring: deque[Mark] = deque()
        self._steps: deque[Step] = deque()

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._ring)

    @property
    def newest(self) -> Mark | None:
        return self._ring[-1] if self._ring else None

    def keep(self, mark: Mark) -> None:
        """One more, unless the last one is as good; those older than a minute go."""
        if self._ring and mark.at - self._ring[-1].at < SPACING_S:
            return
        if self._ring:
            self._steps.append(step(self._ring[-1], mark))
        self._ring.append(mark)
        while mark.at - self._ring[0].at > KEEP_S:
            self._ring.popleft()
            self._steps.popleft()

    def steps(self, now: Mark) -> list[Step]:
        """Those between the notes, and the one to `now` if that is half a second or more."""
        last = self.newest
        if last is None or now.at - last.at < 0.5:
            return [*self._steps]
        return [*self._steps, step(last, now)]

    def before(self, at: float, span_s: float) -> Mark | None:
        """The youngest note at least `span_s` older than `at`; failing that, the oldest; None: there is none."""
        old = [mark for mark in self._ring if at - mark.at >= span_s]
        if old:
            return old[-1]
        return self._ring[0] if self._ring and self._ring[0].at < at else None


def rise(after: Mapping[Key, float], before: Mapping[Key, float]) -> Counter[Key]:
    """How much each has grown; only those that did."""
    return Counter({key: grown for key, value in after.items() if (grown := value - before.get(key, 0.0)) > 0})


def rate(after: Mark, before: Mark) -> Callable[[float], float]:
    """What makes rates a second of counts that grew between two notes."""
    span_s = after.at - before.at
    return lambda count: round(count / span_s, 3) if span_s > 0 else 0.0


def _by(family: Family[Count], place: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for labels, child in family.children():
        found[labels[place]] = found.get(labels[place], 0.0) + child.value
    return found


def _sums(family: Family[Count], first: int, second: int) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for labels, child in family.children():
        key = labels[first], labels[second]
        found[key] = found.get(key, 0.0) + child.value
    return found


def _total(family: Family[Count]) -> float:
    return sum(child.value for _, child in family.children())


def _sketches(family: Family[Histogram], before: Mapping[str, Counts]) -> dict[str, Counts]:
    """Counts by endpoint, models added up."""
    parts: dict[str, list[Counts]] = {}
    for labels, child in family.children():
        parts.setdefault(labels[1], []).append(child.sketch)
    found = {name: merged(counts) for name, counts in parts.items()}
    return {name: old if (old := before.get(name)) == counts else counts for name, counts in found.items()}

"""Runs the comparison of endpoints' speeds: samples streams, starts reviews, finds late requests.

The comparison is in policies.health.speed_outlier, and the endpoint table acts on its verdicts.
Reservations measure prefill times. The pace of streams is sampled once a second, so that it costs
nothing per chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from gateway.fleet.live_endpoint import LiveEndpoint, step_tokens
from gateway.protocol.response.relay import Relay
from policies.health import late_request_detection, speed_outlier
from policies.health.endpoint_health import HealthState
from policies.health.endpoint_speed import Slowness, SpeedVerdict
from policies.health.late_request_detection import Expectations
from policies.health.speed_outlier import ReviewedEndpoint, SlowLimits
from policies.health.speed_samples import Measure
from policies.routing_types import Candidate, Endpoint, Request

REVIEW_S = 1.0
STALL_CHECK_S = 0.05
LATE_CHECKS = 3  # intervals between two calls above which the gateway itself was delayed
GPU_LABEL = "gpu"  # the label by which a configuration declares an endpoint's hardware
MEASURE_TEXTS = {"ttft": "to the first token", "tpot": "per token", "answer": "per answer"}
IN_ROTATION = (HealthState.UP, HealthState.RETURNING)


COHORT = 64
"""Maximum number of endpoints that are compared with each other.

A larger pool is divided into groups of this size (cohorts), so that one comparison takes little
time.
"""

COHORTS_AT_ONCE = 4

STREAMS_AT_ONCE = 512
"""Number of streams after which one call samples no further endpoint.

Among thousands of streams, which no cache holds, a sample takes about a microsecond.
"""


class WaitingPrompt(Protocol):
    """The interface of a request that waits for its first byte; its further wait is predicted.

    Reservation implements it.
    """

    live: LiveEndpoint
    request: Request
    queued_tokens: int

    @property
    def is_behind(self) -> bool: ...


class StreamSample(NamedTuple):
    """The number of events of each stream of an endpoint, until a monotonic time."""

    taken_at: float
    events: Mapping[Relay, int]


class _Cohort:
    # Endpoints of one pool that are reviewed together; a large pool has several cohorts.
    #
    # index       number of the cohort in its pool
    # samples     the last sample of each endpoint's streams
    # is_partial  the pool has other cohorts

    __slots__ = ("_to_sample", "index", "is_partial", "lives", "pool", "reviewed_at", "samples")

    def __init__(
        self, pool: str, index: int, lives: Sequence[LiveEndpoint], *, is_partial: bool
    ) -> None:
        self.pool, self.index, self.lives, self.is_partial = pool, index, lives, is_partial
        self.reviewed_at = 0.0
        self.samples: dict[LiveEndpoint, StreamSample] = {}
        self._to_sample: list[LiveEndpoint] = []

    def continue_from(self, old: _Cohort) -> None:
        # Take over the time of the last review, and the samples of the endpoints that remain.
        remaining = set(self.lives)
        self.reviewed_at = old.reviewed_at
        self.samples = {live: old.samples[live] for live in old.samples if live in remaining}
        self._to_sample = [live for live in old._to_sample if live in remaining]

    def sample_streams(self, now: float) -> bool:
        # Record the pace of the next streams since their last sample. Return whether all have been
        # sampled, so that the endpoints can be compared; otherwise the next call continues.
        if not self._to_sample:
            self._to_sample = list(self.lives)
        left = STREAMS_AT_ONCE
        while self._to_sample and left > 0:
            live = self._to_sample.pop()
            before = self.samples.get(live, StreamSample(0.0, {}))
            self.samples[live] = sample_stream_pace(live, before, now)
            left -= len(live.upstream.connections)
        if self._to_sample:
            return False
        self.reviewed_at = now
        return True


def _reviewed_at(cohort: _Cohort) -> float:
    return cohort.reviewed_at


class SpeedMonitor:
    """Samples the pace of streams, and compares the speeds of each pool's endpoints.

    `limits` has the configured limits; a reload replaces it.
    """

    __slots__ = (
        *("_cohorts", "_expectations", "_checked_at", "_next_cohort", "_paused_at", "_pools"),
        *("limits", "reviewed"),
    )

    def __init__(self, limits: SlowLimits) -> None:
        self.limits = limits
        self._checked_at, self._paused_at, self._next_cohort = 0.0, -inf, 0
        self._pools: Mapping[str, Sequence[Candidate]] = {}
        self._cohorts: list[_Cohort] = []
        self._expectations: dict[str, Expectations] = {}
        self.reviewed: list[LiveEndpoint] = []

    def sweep(
        self, pools: Mapping[str, Sequence[Candidate]], by_slot: Sequence[LiveEndpoint], now: float
    ) -> Iterator[tuple[LiveEndpoint, SpeedVerdict]]:
        """Compare the speeds of endpoints, and yield those whose verdict has changed.

        Endpoints are compared every REVIEW_S seconds, or in turn if that is too short for all. In a
        large pool, one call compares only COHORT endpoints, so that no call takes long. Afterwards,
        `reviewed` lists the endpoints that were compared.
        """
        self._update_cohorts(pools, by_slot)
        self.reviewed = []
        is_over = False
        for cohort in sorted(self._cohorts, key=_reviewed_at):
            is_due = now - cohort.reviewed_at >= REVIEW_S
            if is_due and not (is_over and cohort.is_partial):
                is_over = is_over or cohort.is_partial
                if not cohort.sample_streams(now):
                    return
                self.reviewed += cohort.lives
                yield from self._review(cohort, now)

    def _update_cohorts(
        self, pools: Mapping[str, Sequence[Candidate]], by_slot: Sequence[LiveEndpoint]
    ) -> None:
        # Form new cohorts (groups of endpoints to compare) after the endpoints have changed.
        if pools is self._pools:
            return
        self._pools, before = pools, {(part.pool, part.index): part for part in self._cohorts}
        self._cohorts = []
        for pool, candidates in pools.items():
            lives = [by_slot[candidate.load.slot] for candidate in candidates]
            count = -(-len(lives) // COHORT) or 1
            for index in range(count):
                cohort = _Cohort(pool, index, lives[index::count], is_partial=count > 1)
                old = before.get((pool, index))
                if old is not None:
                    cohort.continue_from(old)
                self._cohorts.append(cohort)

    def _review(self, cohort: _Cohort, now: float) -> Iterator[tuple[LiveEndpoint, SpeedVerdict]]:
        # Review one cohort; yield the endpoints whose verdict has changed.
        #
        # Endpoints out of rotation are neither judged nor compared with.
        rated = [live for live in cohort.lives if _is_rated(live)]
        before = [live.speed.verdict for live in rated]
        members = [_member(live) for live in rated]
        peer_times_by_kind = speed_outlier.review(members, now, self.limits)
        expectations = self._expectations_of(cohort.pool)
        if cohort.is_partial:  # keep the findings of a review in another cohort
            known = {kind: times for kind, times in peer_times_by_kind.items() if times.count}
            peer_times_by_kind = {**expectations.peer_times_by_kind, **known}
        expectations.peer_times_by_kind = peer_times_by_kind
        for live, verdict in zip(rated, before, strict=True):
            if live.speed.verdict is not verdict:
                yield live, live.speed.verdict

    def stalled(
        self, pools: Mapping[str, Sequence[Candidate]], by_slot: Sequence[LiveEndpoint], now: float
    ) -> tuple[list[LiveEndpoint], list[LiveEndpoint]]:
        """Return the endpoints where requests may be late, and those of them to throttle.

        Requests may be late at two kinds of endpoints, which the first list contains:

        - The current prefill step takes much longer than at peers.
        - The endpoint was late before or may be slow.

        Call this every STALL_CHECK_S seconds. Each call looks at a part of the endpoints,
        COHORTS_AT_ONCE cohorts. After a long pause between two calls, both lists are empty: the
        gateway itself was delayed then, so the age of a step shows nothing.
        """
        is_delayed, self._checked_at = self._is_check_late(now), now
        if is_delayed:
            self._paused_at = now
        if is_delayed or not self.limits.factor:
            return [], []
        self._update_cohorts(pools, by_slot)
        late, doubtful = list[LiveEndpoint](), list[LiveEndpoint]()
        for cohort in self._take_turn():
            if any(live.load.in_flight and _may_be_late(live, now) for live in cohort.lives):
                rated = [live for live in cohort.lives if _is_rated(live)]
                members = [_member(live) for live in rated]
                stalled = self._expectations_of(cohort.pool).stalled(members, now)
                doubted = [late_request_detection.is_doubted(live.load) for live in rated]
                indices = {index for _, index in stalled}
                late += [
                    live for index, live in enumerate(rated) if index in indices or live.is_doubted
                ]
                doubtful += [
                    rated[index]
                    for index in late_request_detection.choose_doubted(stalled, doubted)
                ]
        return late, doubtful

    def was_paused(self, now: float) -> bool:
        """Return whether the gateway itself has just been paused, for example without CPU time.

        After a pause, engines may only look silent: the event loop may run its timers before it
        reads the answers that have arrived. By the next check for stalls, it has read them.
        """
        is_late = self._checked_at > 0.0 and self._is_check_late(now)
        return is_late or now - self._paused_at < STALL_CHECK_S

    def _is_check_late(self, now: float) -> bool:
        return now - self._checked_at > LATE_CHECKS * STALL_CHECK_S

    def _take_turn(self) -> Sequence[_Cohort]:
        cohorts = self._cohorts
        if len(cohorts) <= COHORTS_AT_ONCE:
            return cohorts
        first = self._next_cohort % len(cohorts)
        self._next_cohort = first + COHORTS_AT_ONCE
        return [*cohorts[first:], *cohorts][:COHORTS_AT_ONCE]

    def predict_first_byte_s(
        self, live: LiveEndpoint, request: Request, tokens: int
    ) -> float | None:
        """Predict the seconds until the first byte of a request's answer.

        `tokens` is the number of prompt tokens that must be computed first. Returns None if the
        endpoint's speed is unknown.
        """
        expectations = self._expectations_of(live.endpoint.pool)
        return expectations.first_byte_s(_member(live), *_work(live, request, tokens))

    def predict_remaining_s(
        self, reservation: WaitingPrompt, waited_s: float, now: float, *, is_doubted: bool
    ) -> float | None:
        """Predict for how many more seconds a late request will wait for its first byte.

        waited_s    seconds that it has waited already
        now         monotonic time in seconds
        is_doubted  whether its endpoint is suspected of slowness

        Returns None while the request is not late.
        """
        live = reservation.live
        work = _work(live, reservation.request, reservation.queued_tokens)
        return self._expectations_of(live.endpoint.pool).predict_remaining_s(
            _member(live),
            *work,
            waited_s,
            now,
            is_doubted=is_doubted,
            is_behind=reservation.is_behind,
        )

    def on_overtaken(self, live: LiveEndpoint, tokens: int, now: float) -> None:
        """Record that a request was late at the endpoint and left before its first token.

        This is evidence of slowness. `tokens` is the number of prompt tokens that the endpoint had
        to compute. Pass 0 if the first token of the answer cannot be observed; then nothing is
        recorded.
        """
        if tokens:
            expectations, member = self._expectations_of(live.endpoint.pool), _member(live)
            live.speed.on_overtaken(
                tokens,
                member.step_tokens,
                now,
                late_s=expectations.late_step_s(member, now),
                step_s=expectations.running_step_s(member),
            )

    def on_dropped(self, live: LiveEndpoint, tokens: int, now: float) -> None:
        """Record that a prompt of `tokens` uncached tokens was cancelled before any token."""
        expectations = self._expectations_of(live.endpoint.pool)
        live.speed.on_dropped(tokens, now, step_s=expectations.running_step_s(_member(live)))

    def _expectations_of(self, pool: str) -> Expectations:
        expectations = self._expectations.get(pool)
        if expectations is None:
            expectations = self._expectations[pool] = Expectations()
        return expectations


def _work(live: LiveEndpoint, request: Request, tokens: int) -> tuple[Measure, int]:
    # Return what a request's first byte waits for, and how many tokens that takes.
    #
    # A stream waits for the prompts only; a plain answer of several tokens waits for all of them.
    is_streamed = (request.stream and not live.answers_whole) or request.output_tokens == 1
    return (Measure.TTFT, tokens) if is_streamed else (Measure.ANSWER, request.output_tokens)


def _is_rated(live: LiveEndpoint) -> bool:
    return live.health.state in IN_ROTATION and not live.is_drained


def _may_be_late(live: LiveEndpoint, now: float) -> bool:
    # Return whether prompts wait in doubt, or for a step old enough to be checked for a stall.
    is_old = now - live.speed.since >= late_request_detection.LEAST_LATE_S
    return live.speed.waiting > 0 and (is_old or live.is_doubted)


def _member(live: LiveEndpoint) -> ReviewedEndpoint:
    return ReviewedEndpoint(
        live.speed,
        hardware_key(live.endpoint),
        live.load.belief.shape,
        step_tokens(live),
    )


def hardware_key(endpoint: Endpoint) -> Hashable:
    """Return the attributes of an endpoint, such as its GPU, that determine its normal speed.

    Only the speeds of endpoints with equal attributes are compared.
    """
    return (
        endpoint.role,
        endpoint.engine,
        endpoint.layout,
        endpoint.labels.get(GPU_LABEL),
        endpoint.served_model,
    )


def sample_stream_pace(live: LiveEndpoint, before: StreamSample, now: float) -> StreamSample:
    """Record how fast an endpoint's streams have produced events since the sample `before`.

    Returns the sample of now, to be passed to the next call.
    """
    totals: dict[Relay, int] = {}
    streams = events = 0
    for connection in live.upstream.connections:
        relay = connection.active_stream
        if relay is not None:
            totals[relay] = total = relay.event_count
            last = before.events.get(relay)
            if last is not None:
                streams += 1
                events += total - last
    live.speed.record_streams(streams, events, now - before.taken_at, now)
    return StreamSample(now, totals)


def describe_slowness(slowness: Slowness) -> str:
    """Return a text that states how slow an endpoint is compared with its peers.

    The log and the live view show it.
    """
    own_ms, peers_ms = slowness.seconds * 1000, slowness.peers_s * 1000
    measure = MEASURE_TEXTS[slowness.measure]
    times = f"{own_ms:.0f} ms, they {peers_ms:.0f} ms"
    return f"{slowness.ratio:.1f} times as slow as its peers {measure} ({times})"


def find_healthy_peer(live: LiveEndpoint, others: Sequence[LiveEndpoint]) -> LiveEndpoint | None:
    """Return the least loaded healthy endpoint of the same role; None if there is none.

    Endpoints with equal hardware are preferred.
    """
    healthy = [
        other
        for other in others
        if other is not live
        and other.health.state is HealthState.UP
        and other.speed.verdict is SpeedVerdict.NORMAL
        and other.endpoint.role is live.endpoint.role
    ]
    kind = hardware_key(live.endpoint)
    return min(
        healthy,
        key=lambda other: (hardware_key(other.endpoint) != kind, other.load.in_flight),
        default=None,
    )

"""The speed monitor: once a second it compares the endpoints of every pool and reports whose verdict has changed.

The comparison is policies/outlier.py's, what follows from a verdict endpoints.py's. Prefill evidence comes from
bookings; the pace of streams is sampled here, so that a chunk costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from gateway.relay import Relay
from gateway.roster import LiveEndpoint, step_tokens
from policies import outlier, stall
from policies.health import State
from policies.model import Candidate, Endpoint, Request
from policies.outlier import Member, SlowLimits
from policies.speed_record import Measure, Slowness, Verdict
from policies.stall import Expectations

REVIEW_S = 1.0
GLANCE_S = 0.05
LATE_GLANCES = 3  # intervals between two calls from which on the gateway itself was held up
GPU = "gpu"  # the label that declares unequal hardware
MEASURES = {"ttft": "to the first token", "tpot": "per token", "answer": "per answer"}
IN_ROTATION = (State.UP, State.RETURNING)


class SpeedMonitor:
    """Samples streams and reviews pools. `limits` are replaced by a reload."""

    __slots__ = ("_expectations", "_glanced_at", "_pieces", "limits", "reviewed_at")

    def __init__(self, limits: SlowLimits) -> None:
        self.limits = limits
        self.reviewed_at = self._glanced_at = 0.0
        self._pieces: dict[LiveEndpoint, dict[Relay, int]] = {}
        self._expectations: dict[str, Expectations] = {}

    def sweep(
        self, pools: Mapping[str, Sequence[Candidate]], by_slot: Sequence[LiveEndpoint], now: float
    ) -> Iterator[tuple[LiveEndpoint, Verdict]]:
        """Endpoints whose verdict has changed. May be called more often than a review is due."""
        passed_s = now - self.reviewed_at
        if passed_s < REVIEW_S:
            return
        self.reviewed_at = now
        pieces, self._pieces = self._pieces, {}
        for pool, candidates in pools.items():
            lives = [by_slot[candidate.load.slot] for candidate in candidates]
            for live in lives:
                self._pieces[live] = sample_streams(live, pieces.get(live, {}), passed_s, now)
            yield from self._review(pool, lives, now)

    def _review(self, pool: str, lives: Sequence[LiveEndpoint], now: float) -> Iterator[tuple[LiveEndpoint, Verdict]]:
        """One pool. Endpoints out of rotation are neither judged nor a yardstick."""
        rated = [live for live in lives if _is_rated(live)]
        before = [live.speed.verdict for live in rated]
        expectations = self._expectations_of(pool)
        expectations.yardsticks = outlier.review([_member(live) for live in rated], now, self.limits)
        for live, verdict in zip(rated, before, strict=True):
            if live.speed.verdict is not verdict:
                yield live, live.speed.verdict

    def stalled(
        self, pools: Mapping[str, Sequence[Candidate]], by_slot: Sequence[LiveEndpoint], now: float
    ) -> tuple[list[LiveEndpoint], list[LiveEndpoint]]:
        """Endpoints whose prefill step under way takes much longer than at their peers, and those to doubt.

        Due every GLANCE_S. After a gap between two calls the gateway itself was held up, and the age of a step proves
        nothing.
        """
        passed_s, self._glanced_at = now - self._glanced_at, now
        if passed_s > LATE_GLANCES * GLANCE_S or not self.limits.factor:
            return [], []
        late, doubtful = list[LiveEndpoint](), list[LiveEndpoint]()
        for pool, candidates in pools.items():
            if any(_has_waited(by_slot[candidate.load.slot], now) for candidate in candidates):
                rated = [live for each in candidates if _is_rated(live := by_slot[each.load.slot])]
                stalled = self._expectations_of(pool).stalled([_member(live) for live in rated], now)
                doubted = [stall.is_doubted(live.load) for live in rated]
                late += [rated[index] for _, index in stalled]
                doubtful += [rated[index] for index in stall.choose_doubted(stalled, doubted)]
        return late, doubtful

    def first_byte_s(self, live: LiveEndpoint, request: Request, tokens: int) -> float | None:
        """Seconds to the first byte of an answer behind so many prompt tokens; None while that is not known."""
        return self._expectations_of(live.endpoint.pool).first_byte_s(_member(live), *_work(request, tokens))

    def left_s(self, live: LiveEndpoint, request: Request, tokens: int, waited_s: float, now: float) -> float | None:
        """Seconds that a request without a first byte is expected to wait yet; None while it is not late."""
        expectations = self._expectations_of(live.endpoint.pool)
        return expectations.left_s(_member(live), *_work(request, tokens), waited_s, now)

    def _expectations_of(self, pool: str) -> Expectations:
        expectations = self._expectations.get(pool)
        if expectations is None:
            expectations = self._expectations[pool] = Expectations()
        return expectations


def _work(request: Request, tokens: int) -> tuple[Measure, int]:
    """What the first byte of an answer waits for: `tokens` of prompts, or the whole answer."""
    streams = request.stream or request.output_tokens == 1
    return (Measure.TTFT, tokens) if streams else (Measure.ANSWER, request.output_tokens)


def _is_rated(live: LiveEndpoint) -> bool:
    """Whether it is compared with others: endpoints out of rotation are neither judged nor a yardstick."""
    return live.health.state in IN_ROTATION and not live.drained


def _has_waited(live: LiveEndpoint, now: float) -> bool:
    """Whether a prefill step is under way there that may be a stall."""
    return live.speed.waiting > 0 and now - live.speed.since >= stall.LEAST_LATE_S


def _member(live: LiveEndpoint) -> Member:
    return Member(live.speed, kind_of(live.endpoint), live.load.belief.shape, step_tokens(live))


def kind_of(endpoint: Endpoint) -> Hashable:
    """What the configuration declares of the endpoint's speed: peers have the same."""
    return endpoint.role, endpoint.engine, endpoint.layout, endpoint.labels.get(GPU), endpoint.served_model


def sample_streams(live: LiveEndpoint, before: Mapping[Relay, int], passed_s: float, now: float) -> dict[Relay, int]:
    """Count what the endpoint's streams made since the last time; the pieces that each has made by now."""
    pieces: dict[Relay, int] = {}
    streams = made = 0
    for connection in live.upstream.connections:
        relay = connection.streaming
        if relay is not None:
            pieces[relay] = events = relay.events
            last = before.get(relay)
            if last is not None:
                streams += 1
                made += events - last
    live.speed.streamed(streams, made, passed_s, now)
    return pieces


def describe(slowness: Slowness) -> str:
    """How slow an endpoint is, for the log and the live page."""
    seconds, peers_s = slowness.seconds * 1000, slowness.peers_s * 1000
    what = MEASURES[slowness.measure]
    return f"{slowness.ratio:.1f} times as slow as its peers {what} ({seconds:.0f} ms, they {peers_s:.0f} ms)"


def well_peer(live: LiveEndpoint, others: Sequence[LiveEndpoint]) -> LiveEndpoint | None:
    """The least loaded of the well ones with the endpoint's role, of its kind if there is one."""
    well = [
        other
        for other in others
        if other is not live
        and other.health.state is State.UP
        and other.speed.verdict is Verdict.NORMAL
        and other.endpoint.role is live.endpoint.role
    ]
    kind = kind_of(live.endpoint)
    return min(well, key=lambda other: (kind_of(other.endpoint) != kind, other.load.in_flight), default=None)

"""The speed monitor: compares the endpoints of every pool once a second.

The comparison is in policies.outlier; the endpoint table acts on the verdicts. Prefill times are
measured by bookings. The pace of streams is sampled here, so that it costs nothing per chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from gateway.relay import Relay
from gateway.roster import LiveEndpoint
from policies import outlier
from policies.health import State
from policies.model import Candidate, Endpoint, Request
from policies.outlier import Member, SlowLimits, Yardsticks
from policies.speed_record import Measure, Slowness, Verdict

REVIEW_S = 1.0
GPU = "gpu"  # the endpoint label that declares its hardware
MEASURES = {"ttft": "to the first token", "tpot": "per token", "answer": "per answer"}
IN_ROTATION = (State.UP, State.RETURNING)


class SpeedMonitor:
    """Samples streams and reviews pools. A reload replaces `limits`."""

    __slots__ = ("_events", "_reviewed_at", "_yardsticks", "limits")

    def __init__(self, limits: SlowLimits) -> None:
        self.limits = limits
        self._reviewed_at = 0.0
        self._events: dict[LiveEndpoint, dict[Relay, int]] = {}
        self._yardsticks: dict[str, Yardsticks] = {}

    def sweep(
        self, pools: Mapping[str, Sequence[Candidate]], by_slot: Sequence[LiveEndpoint], now: float
    ) -> Iterator[tuple[LiveEndpoint, Verdict]]:
        """Review all pools if a review is due; yield the endpoints whose verdict has changed."""
        elapsed_s = now - self._reviewed_at
        if elapsed_s < REVIEW_S:
            return
        self._reviewed_at = now
        events, self._events = self._events, {}
        for pool, candidates in pools.items():
            lives = [by_slot[candidate.load.slot] for candidate in candidates]
            for live in lives:
                self._events[live] = sample_streams(live, events.get(live, {}), elapsed_s, now)
            yield from self._review(pool, lives, now)

    def _review(
        self, pool: str, lives: Sequence[LiveEndpoint], now: float
    ) -> Iterator[tuple[LiveEndpoint, Verdict]]:
        """Review one pool.

        Endpoints out of rotation are not judged, and peers are not compared to them.
        """
        rated = [live for live in lives if live.health.state in IN_ROTATION and not live.drained]
        before = [live.speed.verdict for live in rated]
        members = [_member(live) for live in rated]
        self._yardsticks[pool] = outlier.review(members, now, self.limits)
        for live, verdict in zip(rated, before, strict=True):
            if live.speed.verdict is not verdict:
                yield live, live.speed.verdict

    def first_byte_s(self, live: LiveEndpoint, request: Request, tokens: int) -> float | None:
        """Predict the seconds to the first byte behind `tokens` prompt tokens; None if unknown."""
        peer_s = self._peer_s(live, request, tokens)
        slowness = live.speed.slowness
        return peer_s if peer_s is None or slowness is None else peer_s * slowness.ratio

    def left_s(
        self, live: LiveEndpoint, request: Request, tokens: int, waited_s: float, factor: float
    ) -> float | None:
        """Predict how many more seconds a late request will wait for its first byte.

        Returns None while the request is not late, that is, before `factor` times what the peers
        need. A late request is expected to wait as long again as it is late: nothing better is
        known of an endpoint that is slower than its peers.
        """
        expected_s, slowness = self._peer_s(live, request, tokens), live.speed.slowness
        if expected_s is None or waited_s < factor * expected_s:
            return None
        late_s = waited_s - expected_s
        return late_s if slowness is None else max(late_s, slowness.ratio * expected_s - waited_s)

    def _peer_s(self, live: LiveEndpoint, request: Request, tokens: int) -> float | None:
        """Return the seconds that the endpoint's peers need to the first byte."""
        is_streamed = request.stream or request.output_tokens == 1
        measure, work = Measure.TTFT, tokens
        if not is_streamed:
            measure, work = Measure.ANSWER, request.output_tokens
        yardsticks = self._yardsticks.get(live.endpoint.pool, {})
        yardstick = yardsticks.get((kind_of(live.endpoint), measure))
        if yardstick is None:
            return None
        return yardstick.usual_s(work, live.load.belief.shape) or None


def _member(live: LiveEndpoint) -> Member:
    load, speed, shape = live.load, live.speed, live.load.belief.shape
    others = load.in_flight - load.decoding - speed.waiting
    step_tokens = speed.step_tokens(load.prefill_tokens, shape.budget_tokens, others)
    return Member(speed, kind_of(live.endpoint), shape, step_tokens)


def kind_of(endpoint: Endpoint) -> Hashable:
    """Return the attributes that determine speed; endpoints with equal ones are peers."""
    return (
        endpoint.role,
        endpoint.engine,
        endpoint.layout,
        endpoint.labels.get(GPU),
        endpoint.served_model,
    )


def sample_streams(
    live: LiveEndpoint, before: Mapping[Relay, int], elapsed_s: float, now: float
) -> dict[Relay, int]:
    """Record the endpoint's pace: events of its streams since the last sample, `before`.

    Returns the total events of each stream so far, for the next call.
    """
    totals: dict[Relay, int] = {}
    streams = events = 0
    for connection in live.upstream.connections:
        relay = connection.streaming
        if relay is not None:
            totals[relay] = total = relay.events
            last = before.get(relay)
            if last is not None:
                streams += 1
                events += total - last
    live.speed.streamed(streams, events, elapsed_s, now)
    return totals


def describe(slowness: Slowness) -> str:
    """Describe how slow an endpoint is, for the log and the live page."""
    own_ms, peers_ms = slowness.seconds * 1000, slowness.peers_s * 1000
    measure = MEASURES[slowness.measure]
    times = f"{own_ms:.0f} ms, they {peers_ms:.0f} ms"
    return f"{slowness.ratio:.1f} times as slow as its peers {measure} ({times})"


def well_peer(live: LiveEndpoint, others: Sequence[LiveEndpoint]) -> LiveEndpoint | None:
    """Return the least loaded healthy endpoint of the same role, preferably same hardware."""
    healthy = [
        other
        for other in others
        if other is not live
        and other.health.state is State.UP
        and other.speed.verdict is Verdict.NORMAL
        and other.endpoint.role is live.endpoint.role
    ]
    kind = kind_of(live.endpoint)
    return min(
        healthy,
        key=lambda other: (kind_of(other.endpoint) != kind, other.load.in_flight),
        default=None,
    )

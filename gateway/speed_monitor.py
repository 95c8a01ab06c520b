"""The speed monitor: once a second it compares the endpoints of every pool and reports whose verdict has changed.

The comparison is policies/outlier.py's, what follows from a verdict endpoints.py's. Prefill evidence comes from
bookings; the pace of streams is sampled here, so that a chunk costs nothing.
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
GPU = "gpu"  # the label that declares unequal hardware
MEASURES = {"ttft": "to the first token", "tpot": "per token", "answer": "per answer"}
IN_ROTATION = (State.UP, State.RETURNING)


class SpeedMonitor:
    """Samples streams and reviews pools. `limits` are replaced by a reload."""

    __slots__ = ("_pieces", "_reviewed_at", "_yardsticks", "limits")

    def __init__(self, limits: SlowLimits) -> None:
        self.limits = limits
        self._reviewed_at = 0.0
        self._pieces: dict[LiveEndpoint, dict[Relay, int]] = {}
        self._yardsticks: dict[str, Yardsticks] = {}

    def sweep(
        self, pools: Mapping[str, Sequence[Candidate]], by_slot: Sequence[LiveEndpoint], now: float
    ) -> Iterator[tuple[LiveEndpoint, Verdict]]:
        """Endpoints whose verdict has changed. May be called more often than a review is due."""
        passed_s = now - self._reviewed_at
        if passed_s < REVIEW_S:
            return
        self._reviewed_at = now
        pieces, self._pieces = self._pieces, {}
        for pool, candidates in pools.items():
            lives = [by_slot[candidate.load.slot] for candidate in candidates]
            for live in lives:
                self._pieces[live] = sample_streams(live, pieces.get(live, {}), passed_s, now)
            yield from self._review(pool, lives, now)

    def _review(self, pool: str, lives: Sequence[LiveEndpoint], now: float) -> Iterator[tuple[LiveEndpoint, Verdict]]:
        """One pool. Endpoints out of rotation are neither judged nor a yardstick."""
        rated = [live for live in lives if live.health.state in IN_ROTATION and not live.drained]
        before = [live.speed.verdict for live in rated]
        self._yardsticks[pool] = outlier.review([_member(live) for live in rated], now, self.limits)
        for live, verdict in zip(rated, before, strict=True):
            if live.speed.verdict is not verdict:
                yield live, live.speed.verdict

    def first_byte_s(self, live: LiveEndpoint, request: Request, tokens: int) -> float | None:
        """Seconds to the first byte of an answer behind so many prompt tokens; None while that is not known."""
        usual_s = self._usual_s(live, request, tokens)
        slowness = live.speed.slowness
        return usual_s if usual_s is None or slowness is None else usual_s * slowness.ratio

    def left_s(self, live: LiveEndpoint, request: Request, tokens: int, waited_s: float, factor: float) -> float | None:
        """Seconds that a request without a first byte is expected to wait yet; None while it is not late.

        It is late after `factor` times what the peers would need. As long again as it is late: nothing else is known
        of an endpoint that takes longer than its peers would.
        """
        expected_s, slowness = self._usual_s(live, request, tokens), live.speed.slowness
        if expected_s is None or waited_s < factor * expected_s:
            return None
        late_s = waited_s - expected_s
        return late_s if slowness is None else max(late_s, slowness.ratio * expected_s - waited_s)

    def _usual_s(self, live: LiveEndpoint, request: Request, tokens: int) -> float | None:
        """What the endpoint's peers need to the first byte of such an answer."""
        streams = request.stream or request.output_tokens == 1
        measure, work = (Measure.TTFT, tokens) if streams else (Measure.ANSWER, request.output_tokens)
        yardstick = self._yardsticks.get(live.endpoint.pool, {}).get((kind_of(live.endpoint), measure))
        return None if yardstick is None else yardstick.usual_s(work, live.load.belief.shape) or None


def _member(live: LiveEndpoint) -> Member:
    load, speed, shape = live.load, live.speed, live.load.belief.shape
    others = load.in_flight - load.decoding - speed.waiting
    return Member(
        speed, kind_of(live.endpoint), shape, speed.step_tokens(load.prefill_tokens, shape.budget_tokens, others)
    )


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

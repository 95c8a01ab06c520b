"""Slow groups in a replay: detected by the gateway's own comparison, throttled, ejected and
returned.

Evidence and verdicts are speed_record.py's and outlier.py's. Late requests at a suspect group are
moved, and so are all that wait at an ejected group. Hedging, which a replay does not have, and the
retry budget are not simulated.
"""

from __future__ import annotations

from collections.abc import Hashable

from mockgpu.job import Job
from planner.replay.flight import Flight
from planner.replay.group import Group
from planner.replay.port import FleetPort
from policies import outlier
from policies.load import NO_CEILING
from policies.outlier import Member, SlowLimits, Yardsticks
from policies.saved_state import belief_state, restore_belief
from policies.speed_record import Measure, Verdict

REVIEW_S, SWEEP_S, PROBE_S = 1.0, 0.25, 1.0
LATE_FACTOR = 1.2  # share of the slow factor
CLEAR = 1.6
SUSPECT_CEILING = 1


class Speeds:
    """Owner of the samples of streams. `ejected`: (clock, group) of every ejection."""

    def __init__(self, fleet: FleetPort, factor: float) -> None:
        self._fleet = fleet
        self._limits = SlowLimits(factor)
        self._generated: dict[Job, int] = {}
        self._yardsticks: Yardsticks = {}
        self.ejected: list[tuple[float, int]] = []

    def open(self) -> None:
        """Start the review of the groups, once a second."""
        if self._limits.factor:
            self._fleet.at(REVIEW_S, self._review)
            self._fleet.at(SWEEP_S, self._sweep)

    def _review(self, now: float, _: object) -> None:
        fleet = self._fleet
        rated = [group for group in fleet.groups if group.alive and group.load.available]
        generated: dict[Job, int] = {}
        for group in rated:
            generated |= self._sample(group, now)
        self._generated = generated
        before = [group.speed.verdict for group in rated]
        self._yardsticks = outlier.review([_member(group) for group in rated], now, self._limits)
        for group, verdict in zip(rated, before, strict=True):
            if group.speed.verdict is not verdict:
                self._act(now, group)
        if fleet.under_way:
            fleet.at(now + REVIEW_S, self._review)

    def _sample(self, group: Group, now: float) -> dict[Job, int]:
        """Record the tokens of the group's streams since the last review, as the gateway counts
        events.
        """
        generated = {job: group.engine.made(job, now) for job in group.engine.scheduler.decoding}
        older = [job for job in generated if job in self._generated]
        group.speed.streamed(
            len(older), sum(generated[job] - self._generated[job] for job in older), REVIEW_S, now
        )
        return generated

    def _act(self, now: float, group: Group) -> None:
        verdict, fleet = group.speed.verdict, self._fleet
        group.load.ceiling = NO_CEILING if verdict is Verdict.NORMAL else SUSPECT_CEILING
        others = sum(other.load.available for other in fleet.groups if other is not group)
        if verdict is not Verdict.SLOW or others < len(fleet.groups) / 2:
            return
        self.ejected.append((now, group.load.slot))
        group.load.available = False
        group.speed.restart()
        fleet.door.refresh(now)
        for flight in self._waiting(group):
            fleet.failed(now, flight, group)
        fleet.at(now + PROBE_S, self._probe, group)

    def _waiting(self, group: Group) -> list[Flight]:
        """Return the requests at the group without a first token, in order of arrival."""
        return [
            flight
            for flight in self._fleet.flights.values()
            if flight.group is group and flight.record.first_s is None
        ]

    def _sweep(self, now: float, _: object) -> None:
        """Move late requests away from suspect groups, and record the time they have waited."""
        fleet = self._fleet
        for group in fleet.groups:
            if group.alive and group.speed.verdict is Verdict.SUSPECT:
                for flight in self._waiting(group):
                    if self._is_late(now, group, flight):
                        if group.speed.waiting == 1:
                            group.speed.first_token(
                                max(1, flight.one.input_tokens - flight.believed), now
                            )
                        fleet.failed(now, flight, group)
        if fleet.under_way:
            fleet.at(now + SWEEP_S, self._sweep)

    def _is_late(self, now: float, group: Group, flight: Flight) -> bool:
        yardstick = self._yardsticks.get((_kind(group), Measure.TTFT))
        if yardstick is None or flight.entry is None or flight.tried:
            return False
        usual_s = yardstick.usual_s(flight.ahead_tokens, group.load.belief.shape)
        return 0.0 < LATE_FACTOR * self._limits.factor * usual_s < now - flight.sent_s

    def _probe(self, now: float, group: Group) -> None:
        """Time a small job like the gateway's probe: it takes as long as the engine is slow."""
        if max(group.engine.slow_prefill, group.engine.slow_decode) >= CLEAR * group.kind.slowness:
            if self._fleet.under_way:
                self._fleet.at(now + 2 * PROBE_S, self._probe, group)
            return
        peer = next(
            (other for other in self._fleet.groups if other is not group and other.load.available),
            None,
        )
        if peer is not None:
            restore_belief(group.load.belief, belief_state(peer.load.belief))
        group.speed.accept()
        group.load.ceiling = NO_CEILING
        group.load.available = group.alive
        self._fleet.door.refresh(now)


def _kind(group: Group) -> Hashable:
    """Return a key that is equal for groups that are compared with each other."""
    return group.kind.gpu, group.kind.tp, group.kind.role, group.kind.model


def _member(group: Group) -> Member:
    load, speed, shape = group.load, group.speed, group.load.belief.shape
    others = load.in_flight - load.decoding - speed.waiting
    return Member(
        speed,
        _kind(group),
        shape,
        speed.step_tokens(load.prefill_tokens, shape.budget_tokens, others),
    )

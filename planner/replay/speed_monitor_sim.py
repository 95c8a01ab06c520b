"""Detects slow groups in a replay, with the gateway's own comparison of speeds.

A slow group gets fewer requests, is ejected, and returns after a successful probe. A late request
is moved away from a suspect group. When a group is ejected, all its waiting requests are moved. At
other groups, a late request is hedged: it is also sent to a second group (hedge_sim.py).

Samples and verdicts are computed in policies/health, by speed_samples.py, speed_outlier.py and
late_request_detection.py. The retry budget is not simulated.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mockgpu.scheduler import Job
from planner.replay.group_sim import ReplayGroup
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_interfaces import FleetPort
from policies.endpoint_load import NO_SOFT_CAP
from policies.engine.step_time import StepCosts
from policies.health import speed_outlier
from policies.health.endpoint_speed import SpeedVerdict
from policies.health.late_request_detection import (
    DOUBT_S,
    LEAST_LATE_S,
    RAMP_S,
    SUSPECT_CEILING,
    Expectations,
    choose_doubted,
    is_doubted,
    raised_ceiling,
)
from policies.health.speed_outlier import SlowLimits
from policies.health.speed_samples import Measure
from policies.restart_state import belief_state, restore_belief

REVIEW_S, SWEEP_S, STALL_CHECK_S, PROBE_S = 1.0, 0.25, 0.05, 1.0
PRICE = 2.0  # the value of gateway/forwarding/hedge.py
CLEAR = 1.6


class SpeedMonitorSim:
    """Detects slow engines in a replay by the gateway's own rules, and ejects them.

    It compares the engines' speeds once a second.

    ejected  (virtual time, engine) of every ejection
    """

    def __init__(self, fleet: FleetPort, factor: float) -> None:
        self._fleet = fleet
        self._limits = SlowLimits(factor)
        self._generated: dict[Job, int] = {}
        self._expectations = Expectations()
        self._doubted: dict[ReplayGroup, float] = {}
        self._member_of = {group: _Member(group) for group in fleet.groups}
        self.ejected: list[tuple[float, int]] = []

    def open(self) -> None:
        """Start the comparison of speeds once a second, unless slow engines are never ejected."""
        if self._limits.factor:
            self._fleet.schedule(REVIEW_S, self._review)
            self._fleet.schedule(SWEEP_S, self._sweep)
            self._fleet.schedule(STALL_CHECK_S, self._check_long_prefills)

    def _review(self, now: float, _: object) -> None:
        fleet = self._fleet
        rated = [group for group in fleet.groups if group.is_alive and group.load.is_available]
        generated: dict[Job, int] = {}
        for group in rated:
            generated |= self._sample(group, now)
        self._generated = generated
        before = [group.speed.verdict for group in rated]
        self._expectations.peer_times_by_kind = speed_outlier.review(
            self._members(rated), now, self._limits
        )
        for group, verdict in zip(rated, before, strict=True):
            if group.speed.verdict is not verdict:
                self._apply_verdicts(now, group)
        for group in fleet.groups:
            if group.load.soft_cap == 0:
                group.load.soft_cap = SUSPECT_CEILING
                group.load.mark_changed()
        if fleet.running_requests:
            fleet.schedule(now + REVIEW_S, self._review)

    def _members(self, groups: Sequence[ReplayGroup]) -> list[_Member]:
        return [self._member_of[group] for group in groups]

    def _sample(self, group: ReplayGroup, now: float) -> dict[Job, int]:
        # Record the tokens that the group's streams generated since the last review.
        #
        # Return the generated tokens so far of each running job.
        generated, before = group.engine.generated_tokens(now), self._generated
        older = [tokens - before[job] for job, tokens in generated.items() if job in before]
        group.speed.record_streams(len(older), sum(older), REVIEW_S, now)
        return generated

    def _apply_verdicts(self, now: float, group: ReplayGroup) -> None:
        verdict, fleet = group.speed.verdict, self._fleet
        self._doubted.pop(group, None)
        group.load.soft_cap = NO_SOFT_CAP if verdict is SpeedVerdict.NORMAL else SUSPECT_CEILING
        group.load.mark_changed()
        others = sum(other.load.is_available for other in fleet.groups if other is not group)
        if verdict is not SpeedVerdict.SLOW or others < len(fleet.groups) / 2:
            return
        self.ejected.append((now, group.load.slot))
        group.load.is_available = False
        group.load.mark_changed()
        group.speed.restart()
        fleet.admission.refresh(now)
        for inflight in self._waiting(group):
            fleet.retry_elsewhere(now, inflight, group)
        fleet.schedule(now + PROBE_S, self._probe, group)

    def _waiting(self, group: ReplayGroup) -> list[InflightRequest]:
        # Return the requests at the group without a first token, in order of arrival.
        flights = self._fleet.inflight.values()
        return [
            inflight for inflight in flights if inflight.group is group and _may_leave(inflight)
        ]

    def on_overtaken(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        """Record that a request left its engine before the first token: the engine may be slow.

        This is what EndpointTable.on_overtaken does in the gateway.
        """
        member = self._member_of[group]
        group.speed.on_overtaken(
            _awaited_tokens(inflight),
            group.step_tokens,
            now,
            late_s=self._expectations.late_step_s(member, now),
            step_s=self._expectations.running_step_s(member),
        )
        inflight.is_overtaken = True
        self._doubt(now, group)

    def on_dropped(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        """Record a request that was cancelled before its first token, not because of slowness."""
        step_s = self._expectations.running_step_s(self._member_of[group])
        group.speed.on_dropped(_awaited_tokens(inflight), now, step_s=step_s)

    def _doubt(self, now: float, group: ReplayGroup) -> None:
        # Send the group no request until the next review, and few until its speed has been judged.
        #
        # In the gateway, EndpointTable.doubt() does this.
        if group.speed.verdict is SpeedVerdict.SUSPECT:
            group.load.soft_cap = 0
        elif group.load.soft_cap == NO_SOFT_CAP or group in self._doubted:
            group.load.soft_cap, self._doubted[group] = 0, now + DOUBT_S
        group.load.mark_changed()

    def _check_long_prefills(self, now: float, _: object) -> None:
        fleet = self._fleet
        rated = [group for group in fleet.groups if group.is_alive and group.load.is_available]
        if any(group.speed.waiting and now - group.speed.since >= LEAST_LATE_S for group in rated):
            stalled = self._expectations.stalled(self._members(rated), now)
            doubted = [is_doubted(group.load) for group in rated]
            if stalled or True in doubted:
                self._act_on_stalls(now, rated, stalled, doubted)
        if fleet.running_requests:
            fleet.schedule(now + STALL_CHECK_S, self._check_long_prefills)

    def _act_on_stalls(
        self,
        now: float,
        rated: Sequence[ReplayGroup],
        stalled: Sequence[tuple[float, int]],
        doubted: Sequence[bool],
    ) -> None:
        # Doubt the groups with the worst stalls, and move or hedge the late requests.
        for index in choose_doubted(stalled, doubted):
            self._doubt(now, rated[index])
        late = {rated[index] for _, index in stalled}
        for group in rated:
            if group in late or self._is_in_doubt(group):
                self._consider(now, group, self._waiting(group))

    def _sweep(self, now: float, _: object) -> None:
        # Move or hedge late requests at all groups, and raise the limits of doubted groups.
        fleet = self._fleet
        for group, until_s in tuple(self._doubted.items()):
            if now >= until_s:
                group.load.soft_cap = raised_ceiling(group.load.soft_cap)
                group.load.mark_changed()
                self._doubted[group] = now + RAMP_S
                if group.load.soft_cap == NO_SOFT_CAP:
                    del self._doubted[group]
        if fleet.disagg is None:
            self._consider_all(now)
        if fleet.running_requests:
            fleet.schedule(now + SWEEP_S, self._sweep)

    def _consider_all(self, now: float) -> None:
        # Consider the requests of all groups, in the order of the groups.
        fleet, waiting = self._fleet, self._old_by_group(now)
        for group in fleet.groups:
            is_rated = group.is_alive and group.load.is_available
            if is_rated and group in waiting and self._consider(now, group, waiting[group]):
                waiting = self._old_by_group(now)

    def _old_by_group(self, now: float) -> dict[ReplayGroup, list[InflightRequest]]:
        # Return the waiting requests that may be late, by group.
        by_group: dict[ReplayGroup, list[InflightRequest]] = {}
        for inflight in self._fleet.inflight.values():
            is_old = inflight.record.first_s is None and now - inflight.sent_s >= LEAST_LATE_S
            if is_old and inflight.group is not None and _may_leave(inflight):
                by_group.setdefault(inflight.group, []).append(inflight)
        return by_group

    def _consider(self, now: float, group: ReplayGroup, waiting: Sequence[InflightRequest]) -> bool:
        # Hedge the late requests at a group, or move them away if it is suspect.
        #
        # The time that a moved request has waited becomes a speed sample of the group. Return
        # whether any was moved or hedged.
        fleet, is_suspect = self._fleet, group.speed.verdict is SpeedVerdict.SUSPECT
        if fleet.disagg is not None:  # as in the gateway: other groups may be for prefills alone
            return False
        has_acted = False
        for inflight in waiting:
            if now - inflight.sent_s < LEAST_LATE_S:
                continue
            is_behind, is_doubted = group.speed.is_behind(inflight.sent_s), self._is_in_doubt(group)
            can_hedge = fleet.hedges.may_send()
            left_s = self._predict_remaining_s(now, inflight, group, is_doubted=is_doubted)
            best = None if left_s is None else self._best(inflight)
            if best is not None and is_doubted and _kind(best[1]) != _kind(group):
                is_doubted = False  # faster hardware answers sooner even if the group is healthy
                left_s = self._predict_remaining_s(now, inflight, group, is_doubted=False)
            speedup = 1.0 if is_behind and is_doubted else PRICE
            moves = is_suspect or (is_doubted and is_behind)
            if left_s is None or best is None or left_s < speedup * best[0]:
                continue
            if not (moves or can_hedge):
                continue
            has_acted = True
            if moves:
                self.on_overtaken(now, inflight, group)
                fleet.retry_elsewhere(now, inflight, group)
            else:
                fleet.hedges.send(now, inflight, best[1])
        return has_acted

    def _predict_remaining_s(
        self, now: float, inflight: InflightRequest, group: ReplayGroup, *, is_doubted: bool
    ) -> float | None:
        return self._expectations.predict_remaining_s(
            self._member_of[group],
            Measure.TTFT,
            inflight.ahead_tokens,
            now - inflight.sent_s,
            now,
            is_doubted=is_doubted,
            is_behind=group.speed.is_behind(inflight.sent_s),
        )

    def _best(self, inflight: InflightRequest) -> tuple[float, ReplayGroup] | None:
        # Return the least expected seconds to a first token elsewhere, and that group; or None.
        #
        # As in the gateway, only groups that had free capacity at the first pick are considered.
        cached, pick = inflight.first_cached, inflight.first_pick
        best: tuple[float, ReplayGroup] | None = None
        for candidate in () if pick is None else pick.candidates:
            group, load = self._fleet.groups[candidate.load.slot], candidate.load
            if (
                group is inflight.group
                or not (group.is_alive and load.is_available)
                or load.in_flight >= min(candidate.endpoint.max_concurrency, load.soft_cap)
            ):
                continue
            held = cached[load.slot] if load.slot < len(cached) else 0
            tokens = load.prefill_tokens + max(1, inflight.trace_request.input_tokens - held)
            expected_s = self._expectations.first_byte_s(
                self._member_of[group], Measure.TTFT, tokens
            )
            if expected_s is not None and (best is None or expected_s < best[0]):
                best = expected_s, group
        return best

    def _is_in_doubt(self, group: ReplayGroup) -> bool:
        is_suspect = group.speed.verdict is SpeedVerdict.SUSPECT
        return is_doubted(group.load) and (is_suspect or group in self._doubted)

    def _probe(self, now: float, group: ReplayGroup) -> None:
        # Simulate the gateway's timed probe of an ejected group, which returns once it is fast
        # again.
        if max(group.engine.slow_prefill, group.engine.slow_decode) >= CLEAR * group.kind.slowness:
            if self._fleet.running_requests:
                self._fleet.schedule(now + 2 * PROBE_S, self._probe, group)
            return
        peer = next(
            (
                other
                for other in self._fleet.groups
                if other is not group and other.load.is_available
            ),
            None,
        )
        if peer is not None:
            restore_belief(group.load.belief, belief_state(peer.load.belief))
        group.speed.accept()
        group.load.soft_cap = NO_SOFT_CAP
        group.load.is_available = group.is_alive
        group.load.mark_changed()
        self._fleet.admission.refresh(now)


def _kind(group: ReplayGroup) -> Hashable:
    kind = group.kind
    return kind.labelled_gpu or kind.gpu, kind.tp, kind.role, kind.model


class _Member:
    # A group as the comparison of speeds sees it. Its load is read only where it matters.

    __slots__ = ("_group", "kind", "record")

    def __init__(self, group: ReplayGroup) -> None:
        self._group, self.kind, self.record = group, _kind(group), group.speed

    @property
    def shape(self) -> StepCosts:
        return self._group.load.belief.shape

    @property
    def step_tokens(self) -> int:
        return self._group.step_tokens


def _awaited_tokens(inflight: InflightRequest) -> int:
    return max(1, inflight.trace_request.input_tokens - inflight.believed_tokens)


def _may_leave(inflight: InflightRequest) -> bool:
    is_waiting = inflight.record.first_s is None and inflight.reservation is not None
    return is_waiting and inflight.race is None and not inflight.failed_endpoints

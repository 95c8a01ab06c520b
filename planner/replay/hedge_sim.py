"""Simulates hedged requests: a late request is also sent to a second group.

The group with the earlier first token serves the request, and the other attempt is cancelled.
policies/health/late_request_detection.py decides when a request is late. The retry budget is not
simulated.
"""

from __future__ import annotations

from planner.replay.group_sim import ReplayGroup
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_interfaces import FleetPort
from policies.routing_types import Pick

CREDIT, MOST_SAVED = 200, 50.0  # the values of gateway/forwarding/hedge.py


class Hedges:
    """Sends late requests to a second engine too (a hedge), and keeps the faster of both attempts.

    At most the share `share` of all requests is hedged.

    sent  the times at which hedges were sent
    won   number of hedges whose first token came before that of the first attempt
    """

    def __init__(self, fleet: FleetPort, share: float) -> None:
        self._fleet, self._share = fleet, share
        self._paid_for, self._credit = 0, CREDIT
        self._allowed = share * CREDIT
        self.sent: list[float] = []
        self.won = 0

    def may_send(self) -> bool:
        """Return whether the allowed share permits one more second attempt (hedge) now."""
        came = self._fleet.arrived - self._paid_for
        self._paid_for += came
        paid_back = min(self._credit, came)
        self._credit -= paid_back
        self._allowed = min(MOST_SAVED, self._allowed + self._share * (came - paid_back))
        return self._allowed >= 1.0

    def send(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        fleet = self._fleet
        self._allowed -= 1.0
        self.sent.append(now)
        cached = inflight.first_cached
        held = cached[group.load.slot] if group.load.slot < len(cached) else 0
        pick = Pick(group.candidate, held, 0.0, 1, "hedge", (0.0,), (group.candidate,))
        second = InflightRequest(
            inflight.record,
            inflight.trace_request,
            inflight.request,
            inflight.keys,
            inflight.fingerprint,
        )
        second.race, inflight.race, second.is_hedge = inflight, second, True
        fleet.start(now, second, group, pick)

    def decide(self, now: float, first: InflightRequest) -> InflightRequest:
        """End the race of a request's two attempts: cancel the one that has no first token yet.

        first  the attempt that has its first token

        Returns the attempt that represents the request from now on.
        """
        fleet, other = self._fleet, first.race
        assert other is not None
        first.race = other.race = None
        if first.is_hedge:
            own, late = other, other.group
            if late is not None:
                fleet.speed_monitor.on_overtaken(now, own, late)
            fleet.withdraw(now, own)
            own.job = first.job
            own.group = first.group
            own.reservation = first.reservation
            own.believed_tokens = first.believed_tokens
            own.is_expected, own.is_overtaken = first.is_expected, False
            assert own.job is not None
            assert own.group is not None
            fleet.inflight[own.job] = own
            own.record.group = own.group.name
            self.won += 1
            return own
        fleet.withdraw(now, other)
        return first

    def end_race(self, now: float, inflight: InflightRequest) -> None:
        """Record that one of a request's two attempts was cancelled, so that the race is over.

        inflight  the cancelled attempt. If it was the first attempt, the second one (the hedge) is
                  cancelled as well
        """
        other, inflight.race = inflight.race, None
        if other is not None:
            other.race = None
            if other.is_hedge:
                self._fleet.withdraw(now, other)

"""What the parts of a replayed fleet may use of the fleet.

A Protocol, so that those parts do not import fleet.py, which creates them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mockgpu.job import Job
from planner.replay.gateway_sim import GatewaySim
from planner.replay.group import ReplayGroup
from planner.replay.inflight import InflightRequest
from planner.replay.options import ReplayOptions
from planner.replay.record import RequestEnd
from policies.model import Pick, RoutingQuery


class AdmissionPort(Protocol):
    """Admission as the other parts see it."""

    def refresh(self, now: float) -> None:
        """Recount the places after groups came or went."""

    def on_booked(self, query: RoutingQuery, pick: Pick) -> None:
        """Charge the tenant for a booked pick."""


class DisaggPort(Protocol):
    """Split requests as the other parts see them."""

    def on_group_died(self, now: float, group: ReplayGroup) -> None:
        """Fail or re-plan the split requests that depended on a group that died."""


class HedgesPort(Protocol):
    """Hedges as the other parts see them."""

    def may_send(self) -> bool:
        """Return whether the share allows one more hedge."""

    def send(self, now: float, flight: InflightRequest, group: ReplayGroup) -> None:
        """Send the request to a second group."""


class SpeedsPort(Protocol):
    """The review of groups' speeds as the other parts see it."""

    def doubt(self, now: float, group: ReplayGroup) -> None:
        """Send the group few requests until it was judged."""


class FleetPort(Protocol):
    """One running replay: its event heap, its groups and its requests."""

    options: ReplayOptions
    groups: list[ReplayGroup]
    gateway: GatewaySim
    inflight: dict[Job, InflightRequest]
    running_requests: int

    @property
    def admission(self) -> AdmissionPort: ...

    @property
    def disagg(self) -> DisaggPort | None: ...

    @property
    def hedges(self) -> HedgesPort: ...

    @property
    def speed_monitor(self) -> SpeedsPort: ...

    @property
    def arrived(self) -> int:
        """Requests that have arrived so far."""

    def schedule(self, when_s: float, act: Callable[[float, Any], None], what: Any = None) -> None:
        """Schedule an event.

        Events of the same moment run in the order in which they were scheduled.
        """

    def serve(self, now: float, flight: InflightRequest, query: RoutingQuery) -> None:
        """Pick a group for an admitted request, book it and send it there."""

    def start(self, now: float, flight: InflightRequest, group: ReplayGroup, pick: Pick) -> None:
        """Book the picked group and send it the whole request."""

    def send(
        self, now: float, flight: InflightRequest, group: ReplayGroup, pick: Pick, job: Job
    ) -> None:
        """Send a job to a group; it enters the engine's queue after the API latency."""

    def enter(self, now: float, what: tuple[ReplayGroup, Job]) -> None:
        """Put a job into the engine's queue, unless it was withdrawn meanwhile."""

    def wake(self, now: float, group: ReplayGroup) -> None:
        """Make an engine look at its queue at the end of its present step, or now if it is idle."""

    def withdraw(self, now: float, flight: InflightRequest) -> None:
        """Cancel a request's jobs and give back its bookings."""

    def retry_elsewhere(self, now: float, flight: InflightRequest, group: ReplayGroup) -> None:
        """Retry a request whose group died on another group, or end it if its answer had begun."""

    def end(self, now: float, flight: InflightRequest, end: RequestEnd, reason: str) -> None:
        """End a request."""

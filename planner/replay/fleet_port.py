"""What the parts of a replayed fleet may use of the fleet.

A Protocol, so that those parts do not import fleet.py, which creates them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mockgpu.job import Job
from planner.replay.gateway_sim import Front
from planner.replay.group import Group
from planner.replay.inflight import Flight
from planner.replay.options import Options
from planner.replay.record import End
from policies.model import Ask, Pick


class DoorPort(Protocol):
    """Admission as the other parts see it."""

    def refresh(self, now: float) -> None:
        """Recount the places after groups came or went."""

    def booked(self, query: Ask, pick: Pick) -> None:
        """Charge the tenant for a booked pick."""


class HalvesPort(Protocol):
    """Split requests as the other parts see them."""

    def died(self, now: float, group: Group) -> None:
        """Fail or re-plan the split requests that depended on a group that died."""


class HedgesPort(Protocol):
    """Hedges as the other parts see them."""

    def may_send(self) -> bool:
        """Return whether the share allows one more hedge."""

    def send(self, now: float, flight: Flight, group: Group) -> None:
        """Send the request to a second group."""


class SpeedsPort(Protocol):
    """The review of groups' speeds as the other parts see it."""

    def doubt(self, now: float, group: Group) -> None:
        """Send the group few requests until it was judged."""


class FleetPort(Protocol):
    """One running replay: its event heap, its groups and its requests."""

    options: Options
    groups: list[Group]
    front: Front
    flights: dict[Job, Flight]
    under_way: int

    @property
    def door(self) -> DoorPort: ...

    @property
    def halves(self) -> HalvesPort | None: ...

    @property
    def hedges(self) -> HedgesPort: ...

    @property
    def speeds(self) -> SpeedsPort: ...

    @property
    def arrived(self) -> int:
        """Requests that have arrived so far."""

    def at(self, when_s: float, act: Callable[[float, Any], None], what: Any = None) -> None:
        """Schedule an event.

        Events of the same moment run in the order in which they were scheduled.
        """

    def serve(self, now: float, flight: Flight, query: Ask) -> None:
        """Pick a group for an admitted request, book it and send it there."""

    def start(self, now: float, flight: Flight, group: Group, pick: Pick) -> None:
        """Book the picked group and send it the whole request."""

    def send(self, now: float, flight: Flight, group: Group, pick: Pick, job: Job) -> None:
        """Send a job to a group; it enters the engine's queue after the API latency."""

    def enter(self, now: float, what: tuple[Group, Job]) -> None:
        """Put a job into the engine's queue, unless it was withdrawn meanwhile."""

    def wake(self, now: float, group: Group) -> None:
        """Make an engine look at its queue at the end of its present step, or now if it is idle."""

    def withdraw(self, now: float, flight: Flight) -> None:
        """Cancel a request's jobs and give back its bookings."""

    def failed(self, now: float, flight: Flight, group: Group) -> None:
        """Retry a request whose group died on another group, or end it if its answer had begun."""

    def over_with(self, now: float, flight: Flight, end: End, reason: str) -> None:
        """End a request."""

"""Interfaces through which the parts of a replay (fleet, admission, hedges) call each other.

fleet_sim.py creates the parts. Thanks to these interfaces, no part must import fleet_sim.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mockgpu.scheduler import Job
from planner.replay.gateway_sim import GatewaySim
from planner.replay.group_sim import ReplayGroup
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_options import ReplayOptions
from planner.replay.results import RequestEnd
from policies.routing_types import Pick, RoutingQuery


class AdmissionPort(Protocol):
    """The methods that other parts of a replay call to simulate admission (class AdmissionSim).

    Admission decides which requests enter, wait or are refused.
    """

    def refresh(self, now: float) -> None:
        """Update the capacity of the wait queue after groups were added, removed or failed."""

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        """Charge the tenant of a request that was sent to a group."""


class DisaggPort(Protocol):
    """The methods that other parts of a replay call to simulate split requests (DisaggSim).

    A split request is prefilled by one engine and decoded by another.
    """

    def on_group_died(self, now: float, group: ReplayGroup) -> None:
        """Fail or retry the split requests that depend on a group which has failed."""


class HedgesPort(Protocol):
    """The methods that other parts of a replay call to simulate hedges (class Hedges).

    A hedge is a second copy of a late request, sent to another engine.
    """

    def may_send(self) -> bool:
        """Return whether one more hedge (second copy of a late request) is allowed now."""

    def send(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        """Send a copy of the request to a second group.

        The group with the earlier first token wins.
        """


class SpeedsPort(Protocol):
    """The methods that other parts of a replay call to detect slow engines (SpeedMonitorSim)."""

    def on_overtaken(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        """Record that a request left the group before its first token, so the group may be slow."""


class FleetPort(Protocol):
    """The methods of the running replay (Fleet) that its parts call.

    By these methods, they schedule events, and start, cancel and end requests. A group is one
    simulated engine, or a rank of one.

    engines  the groups of each engine; an engine with several data-parallel ranks has a group for
             each
    """

    options: ReplayOptions
    engines: list[list[ReplayGroup]]
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
        """Return the number of requests that have arrived so far."""

    def schedule(
        self, when_s: float, callback: Callable[[float, Any], None], what: Any = None
    ) -> None:
        """Schedule the call `callback(when_s, what)` for the virtual time `when_s`.

        Events of the same moment run in the order in which they were scheduled.
        """

    def serve(self, now: float, inflight: InflightRequest, query: RoutingQuery) -> None:
        """Pick a group for an admitted request, reserve capacity there, and send the request."""

    def start(self, now: float, inflight: InflightRequest, group: ReplayGroup, pick: Pick) -> None:
        """Reserve capacity at the picked group, and send it the whole request."""

    def send(
        self, now: float, inflight: InflightRequest, group: ReplayGroup, pick: Pick, job: Job
    ) -> None:
        """Send a job to a group.

        It enters the queue of the group's engine after the API latency.
        """

    def job_keys(self, inflight: InflightRequest) -> tuple[int, ...]:
        """Return the ids of the KV blocks that a request adds to the cache of its engine."""

    def enter(self, now: float, what: tuple[ReplayGroup, Job]) -> None:
        """Put a job into the queue of its group's engine, unless the job was cancelled
        meanwhile.
        """

    def wake(self, now: float, group: ReplayGroup) -> None:
        """Let a group's engine read its queue after the current step, or now if the engine is
        idle.
        """

    def withdraw(self, now: float, inflight: InflightRequest) -> None:
        """Cancel what runs for a request on engines, and release the load reserved for it."""

    def retry_elsewhere(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        """Retry a request at another group, because its group has failed.

        If the answer had already begun, the request ends instead.
        """

    def end(self, now: float, inflight: InflightRequest, end: RequestEnd, reason: str) -> None:
        """End a request of the replay with this result and reason."""

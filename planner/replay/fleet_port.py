"""The interfaces by which the parts of a replay call each other.

fleet_sim.py creates the parts. With these interfaces, no part needs to import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mockgpu.job import Job
from planner.replay.gateway_sim import GatewaySim
from planner.replay.group_sim import ReplayGroup
from planner.replay.inflight import InflightRequest
from planner.replay.record import RequestEnd
from planner.replay.replay_options import ReplayOptions
from policies.routing_types import Pick, RoutingQuery


class AdmissionPort(Protocol):
    """The interface of the simulated admission (AdmissionSim) to the other parts of a replay."""

    def refresh(self, now: float) -> None:
        """Update the capacity of the wait queue after groups were added, removed or failed."""

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        """Charge the tenant of a request that was assigned to a group."""


class DisaggPort(Protocol):
    """The interface of the simulation of split requests (DisaggSim) to the other parts of a
    replay.
    """

    def on_group_died(self, now: float, group: ReplayGroup) -> None:
        """Fail or retry the split requests that depended on a group that has failed."""


class HedgesPort(Protocol):
    """The interface of the simulation of hedged requests to the other parts of a replay."""

    def may_send(self) -> bool:
        """Return whether one more hedge (second copy of a slow request) is within the allowed
        share.
        """

    def send(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        """Send a copy of the request to a second group. The first answer wins."""


class SpeedsPort(Protocol):
    """The interface of the review of groups' speeds to the other parts of a replay."""

    def on_overtaken(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        """Record that the request left the group before its first token.

        This is a sign that the group is slow.
        """


class FleetPort(Protocol):
    """The interface of a running replay (Fleet): its events, its groups and its requests.

    engines  the groups of each engine, which are its data-parallel ranks if there are several
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
        """Schedule a call of `callback` at the virtual time `when_s`, with that time and `what` as
        arguments.

        Events of the same moment run in the order in which they were scheduled.
        """

    def serve(self, now: float, inflight: InflightRequest, query: RoutingQuery) -> None:
        """Pick a group for an admitted request, reserve capacity there and send the request."""

    def start(self, now: float, inflight: InflightRequest, group: ReplayGroup, pick: Pick) -> None:
        """Reserve capacity at the picked group and send it the whole request."""

    def send(
        self, now: float, inflight: InflightRequest, group: ReplayGroup, pick: Pick, job: Job
    ) -> None:
        """Send a job to a simulated group.

        It enters the queue of the group's engine after the API latency.
        """

    def job_keys(self, inflight: InflightRequest) -> tuple[int, ...]:
        """Return the ids of the blocks that a request's job adds to the prefix cache."""

    def enter(self, now: float, what: tuple[ReplayGroup, Job]) -> None:
        """Put a job into the queue of its group's engine, unless the job was withdrawn
        meanwhile.
        """

    def wake(self, now: float, group: ReplayGroup) -> None:
        """Let a group's engine read its job queue after the current step, or now if it is idle."""

    def withdraw(self, now: float, inflight: InflightRequest) -> None:
        """Cancel a request's jobs and release its reserved load."""

    def retry_elsewhere(self, now: float, inflight: InflightRequest, group: ReplayGroup) -> None:
        """Retry a request whose group died at another group, or end it if its answer had begun."""

    def end(self, now: float, inflight: InflightRequest, end: RequestEnd, reason: str) -> None:
        """End a request of the replay with this result and reason."""

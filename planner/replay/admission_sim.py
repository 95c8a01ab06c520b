"""Simulates admission in a replay: which requests enter, wait or are refused.

It also simulates the clients, which retry (client_retries.py) or give up. The wait queue and the
admission policy are the gateway's own (wait_queue.py, policies/admission/admission_policy.py).
fleet_sim.py serves the admitted requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random
from types import MappingProxyType

from planner.replay.client_retries import return_delay
from planner.replay.inflight_request import InflightRequest
from planner.replay.replay_interfaces import FleetPort
from planner.replay.results import ReplayRecord, RequestEnd
from policies.admission.admission_policy import Admit, RequestOutcome, Shed
from policies.admission.wait_queue import WaitQueue
from policies.routing_types import Pick, RoutingQuery

TICK_S = 0.1
NO_RETRY_AFTER = Shed("no_capacity", 1.0)
_STATUS: Mapping[RequestEnd, str] = MappingProxyType(
    {RequestEnd.SERVED: "served", RequestEnd.LEFT: "ignored"}
)


class AdmissionSim:
    """Decides in a replay which requests enter, wait or are refused, and simulates their clients.

    Clients retry after a refusal, or give up. The wait queue is the gateway's own; if it is None,
    every request enters at once.
    """

    def __init__(self, fleet: FleetPort, wait_queue: WaitQueue[int] | None) -> None:
        self._fleet = fleet
        self._wait_queue = wait_queue
        self._clients = fleet.options.clients
        self._rng = Random(f"clients {fleet.options.seed}")
        self._waiting: dict[int, InflightRequest] = {}

    def open(self) -> None:
        """Start the periodic work of the wait queue, before the first request arrives."""
        if self._wait_queue is not None:
            self.refresh(0.0)
            self._fleet.schedule(0.0, self._tick)

    def arrive(self, now: float, inflight: InflightRequest) -> None:
        """Simulate the arrival of a request: it enters, waits or is refused.

        The client's patience starts to run at this time.
        """
        if self._clients.patience_s is not None:
            self._fleet.schedule(now + self._clients.patience_s, self._give_up, inflight)
        self._try_enter(now, inflight)

    def refresh(self, now: float) -> None:
        """Update how many requests may run, after simulated engines were added or have failed."""
        if self._wait_queue is not None:
            self._wait_queue.refresh(self._fleet.gateway.candidates)
            self._apply_verdicts(now)

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        """Charge a tenant for the tokens of a request that was sent to a simulated engine.

        Does nothing if there is no wait queue.
        """
        if self._wait_queue is not None:
            self._wait_queue.on_reserved(query, pick)

    def on_ended(self, now: float, inflight: InflightRequest) -> None:
        """Release the permit of a request that has ended, and report how it ended to the policy."""
        if self._returns_permit(inflight):
            assert self._wait_queue is not None
            self._wait_queue.release(inflight.request, _outcome(now, inflight.record))
            self._fleet.schedule(now, self._apply_verdicts)

    def on_not_routed(self, now: float, inflight: InflightRequest) -> None:
        """Refuse an admitted request because no simulated engine can serve it."""
        if self._returns_permit(inflight):
            assert self._wait_queue is not None
            self._wait_queue.free_place(now)
            self._fleet.schedule(now, self._apply_verdicts)
        if inflight.failed_endpoints:
            self._fleet.end(now, inflight, RequestEnd.LOST, "no_capacity")
        else:
            self._refuse(now, inflight, NO_RETRY_AFTER)

    def _returns_permit(self, inflight: InflightRequest) -> bool:
        has_permit, inflight.has_permit = inflight.has_permit, False
        return has_permit

    def _try_enter(self, now: float, inflight: InflightRequest) -> None:
        # Let a request try to enter: its first attempt, or a retry after a refusal.
        if inflight.has_ended:
            return
        if self._wait_queue is None:
            self._fleet.serve(now, inflight, self._fleet.gateway.query(inflight, now))
        elif self._wait_queue.try_enter():
            self._admit(now, inflight)
        else:
            self._enter_queue(now, inflight, self._wait_queue)

    def _enter_queue(
        self, now: float, inflight: InflightRequest, wait_queue: WaitQueue[int]
    ) -> None:
        # Ask the admission about a request, because the fast path was not available.
        fleet, number = self._fleet, inflight.record.number
        query, requery = fleet.gateway.query(inflight, now), partial(fleet.gateway.query, inflight)
        verdict = wait_queue.arrive(
            query, fleet.gateway.fitting(inflight.trace_request), number, requery
        )
        if isinstance(verdict, Admit):
            inflight.has_permit = True
            fleet.serve(now, inflight, query)
        elif isinstance(verdict, Shed):
            self._refuse(now, inflight, verdict)
        else:
            self._waiting[number] = inflight
            fleet.schedule(now + verdict.timeout_s, self._apply_verdicts)

    def _admit(self, now: float, inflight: InflightRequest) -> None:
        inflight.has_permit = True
        self._fleet.serve(now, inflight, self._fleet.gateway.query(inflight, now))

    def _apply_verdicts(self, now: float, _: object = None) -> None:
        wait_queue = self._wait_queue
        if wait_queue is None:
            return
        for number, verdict in wait_queue.take_verdicts(now):
            inflight = self._waiting.pop(number)
            if isinstance(verdict, Admit):
                self._admit(now, inflight)
            elif isinstance(verdict, Shed):
                self._refuse(now, inflight, verdict)

    def _tick(self, now: float, _: object) -> None:
        assert self._wait_queue is not None
        self._wait_queue.tick(now)
        self._apply_verdicts(now)
        if self._fleet.running_requests:
            self._fleet.schedule(now + TICK_S, self._tick)

    def _refuse(self, now: float, inflight: InflightRequest, shed: Shed) -> None:
        # Answer a request with 429, after which its client retries or gives up.
        record = inflight.record
        record.refusals += 1
        if record.refused_s is None:
            record.refused_s = now
            record.promised_s = None if shed.retry_after_s is None else now + shed.retry_after_s
        wait_s = return_delay(self._clients, record.refusals, shed, self._rng)
        if wait_s is None:
            self._fleet.end(now, inflight, RequestEnd.SHED, shed.reason)
        else:
            self._fleet.schedule(now + wait_s, self._try_enter, inflight)

    def _give_up(self, now: float, inflight: InflightRequest) -> None:
        # Cancel a request without a first token, because its client has no more patience.
        if not inflight.has_ended and inflight.record.first_s is None:
            number = inflight.record.number
            if self._waiting.pop(number, None) is not None and self._wait_queue is not None:
                self._wait_queue.cancel(number)
            self._fleet.withdraw(now, inflight)
            self._fleet.end(now, inflight, RequestEnd.LEFT, "patience")


def _outcome(now: float, record: ReplayRecord) -> RequestOutcome:
    status = _STATUS.get(record.end, "dropped")
    output_tokens = record.output_tokens if record.end is RequestEnd.SERVED else 0
    return RequestOutcome(
        now,
        record.ttft_s,
        record.tpot_s,
        output_tokens,
        record.cached_tokens if output_tokens else None,
        status,
    )

"""The wait queue of one pool at run time: requests await a permit to run, or are refused.

This module has the futures on which requests wait. policies/admission/wait_queue.py orders the
requests, and the pool's admission policy decides about each. A request returns its permit by
leaving a `with` block.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from types import MappingProxyType

from gateway.config import WaitingRoom
from gateway.fleet.updates_for_peers import OutgoingUpdates
from gateway.protocol.errors import Failure, GatewayError
from policies.admission import admission_policy
from policies.admission import wait_queue as waiting
from policies.admission.adaptive_session_limit import WorkingSet
from policies.admission.admission_policy import (
    Admission,
    Admit,
    RequestOutcome,
    Shed,
    Verdict,
    Wait,
)
from policies.admission.cap_admission import CapAdmission, SessionCap
from policies.admission.fairness import FairShares, billable_tokens
from policies.admission.priced_admission import PricedAdmission
from policies.endpoint_load import EndpointLoad
from policies.routing_types import Candidate, Pick, Request, RoutingQuery

# uvloop's timers have a resolution of one millisecond and may fire that much early.
# A waiter whose deadline is within this slack therefore counts as due.
TIMER_SLACK_S = 0.002

# Shed reasons that have an error code of their own. All other reasons become Failure.SHED.
SHED_FAILURES: Mapping[str, Failure] = MappingProxyType(
    {
        "waited_too_long": Failure.QUEUE_TIMEOUT,
        "waiting_room_full": Failure.OVERLOADED,
        "too_slow": Failure.OVERLOADED,
        "deadline": Failure.DEADLINE_UNREACHABLE,
    }
)

# Verdicts delivered per turn of the event loop: picking and sending takes about 0.3 ms per request.
VERDICTS_PER_TURN = 4

WaiterFuture = asyncio.Future[Verdict]


class PoolQueue:
    """The wait queue of one pool.

    A request needs a permit to be sent to an endpoint. The number of permits limits how many
    requests the pool serves at once; requests without a permit wait here. Leaving a `with` block on
    this object returns one permit.

    wants_feedback  whether the outcomes of all requests are reported to the admission policy; if
                    not, only the outcomes of requests with a session are
    reads_sessions  whether the admission policy uses the sessions of requests
    """

    __slots__ = (
        "_candidates",
        "_first",
        "_leaving",
        "_queue",
        "_updates",
        "_verdicts",
        "name",
        "reads_sessions",
        "try_take",
        "wants_feedback",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.reads_sessions = False
        self._queue: waiting.WaitQueue[WaiterFuture] = waiting.WaitQueue(CapAdmission())
        self.wants_feedback = False
        self._verdicts: deque[tuple[WaiterFuture, Verdict]] = deque()
        self._first: deque[asyncio.Future[None]] = deque()  # waiters that enter before all others
        self._updates: OutgoingUpdates | None = None
        self._candidates: tuple[Candidate, ...] = ()
        self._leaving: tuple[EndpointLoad, ...] = ()
        self.try_take = self._queue.try_enter

    def configure(
        self,
        limits: WaitingRoom,
        candidates: tuple[Candidate, ...],
        leaving: tuple[EndpointLoad, ...] = (),
    ) -> None:
        """Replace the limits of the wait queue, and the endpoints whose capacity it counts.

        limits      the size of the queue and the longest wait
        candidates  the endpoints to which requests may be sent
        leaving     endpoints that get no new requests but still serve older ones
        """
        self._queue.limits = admission_policy.WaitQueueLimits(limits.size, limits.timeout)
        self._candidates, self._leaving = candidates, leaving
        self.refresh()

    def set_admission(self, policy: Admission, shares: Mapping[str, float]) -> None:
        """Replace the pool's admission policy and the tenants' shares.

        policy  the new admission policy
        shares  relative weight by tenant; 1 for tenants that are not listed

        Outcomes of all requests are reported to the policy, unless it only limits concurrency or
        sessions and no shares are set.
        """
        self._queue.admission = policy
        self._queue.set_shares(FairShares(shares))
        self.wants_feedback = bool(shares) or type(policy) not in (CapAdmission, SessionCap)
        self.reads_sessions = policy.reads_sessions
        self._share_sessions()

    def publish_to_peers(self, updates: OutgoingUpdates | None) -> None:
        """From now on, record this pool's sessions and charges in `updates`, for other gateways.

        A charge is the number of tokens computed for a tenant. With None as `updates`, nothing is
        recorded any more.
        """
        self._updates = updates
        self._share_sessions()

    def _share_sessions(self) -> None:
        if self._updates is not None and self.sessions is not None:
            self.sessions.set_key_function(self._updates.session_digest)

    @property
    def admission(self) -> Admission:
        return self._queue.admission

    @property
    def price(self) -> float:
        """Return the current price of admission, which rises with the length of the queue.

        Only the admission policy `priced` uses it: it refuses a request whose value is below the
        price of its work. The price is 0 while the queue is short and KV memory suffices, and under
        all other policies.
        """
        policy = self._queue.admission
        return policy.price if isinstance(policy, PricedAdmission) else 0.0

    @property
    def sessions(self) -> WorkingSet | None:
        """Return the active sessions, whose contexts count towards the KV memory.

        Returns None if the admission policy does not track sessions.
        """
        policy = self._queue.admission
        return policy.sessions if isinstance(policy, PricedAdmission | SessionCap) else None

    @property
    def session_memory_share(self) -> float:
        """Return which share of the engines' KV memory (0 to 1) the contexts of sessions may use.

        It is 1 if the admission policy does not limit sessions.
        """
        return 1.0 if self.sessions is None else min(1.0, self.sessions.memory_share)

    def learns_from(self, request: Request) -> bool:
        """Return whether the admission policy uses the outcome of this request.

        If so, report the request with on_reserved() and on_finished().
        """
        return self.wants_feedback or (self.reads_sessions and bool(request.session))

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        """Charge an admitted request to its tenant, because its first endpoint has been picked.

        query  the policy's input: the request and its cached tokens at each endpoint
        pick   the endpoint that was picked

        Call this only if learns_from() returns True for the request.
        """
        self._queue.on_reserved(query, pick)
        if self._updates is not None:
            tokens = billable_tokens(query.request, pick.cached_tokens)
            self._updates.add_charge(self.name, query.request.tenant, tokens)

    def on_finished(self, request: Request, outcome: Callable[[], RequestOutcome]) -> None:
        """Correct the tenant's charge for a request that has ended, and report its outcome.

        outcome  function that returns the outcome; it is called only if the policy uses outcomes
        """
        if not self.learns_from(request):
            return
        result = outcome()
        self._queue.on_ended(request, result)
        if self._updates is not None:
            correction = result.output_tokens - request.output_tokens
            self._updates.add_charge(self.name, request.tenant, correction)

    def add_peer_charge(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for `tokens` tokens that another gateway has computed for it.

        Without this, a tenant could get its fair share once from every gateway.
        """
        self._queue.charge_peer_work(tenant, tokens)

    def tick(self, now: float) -> None:
        """Run the periodic work of the pool's admission policy. Call it about every 100 ms."""
        self._queue.tick(now)
        if self._queue.waiting or self._first:
            self._settle()

    def refresh(self) -> None:
        """Recompute the pool's capacity after a change of its endpoints.

        Waiting requests that now fit are admitted.
        """
        self._queue.refresh(self._candidates, self._leaving)
        self._settle()

    @property
    def in_flight(self) -> int:
        return self._queue.in_flight

    @property
    def queue_length(self) -> int:
        return self._queue.waiting + len(self._first)

    @property
    def queued_tokens(self) -> int:
        """Return the total number of prompt tokens of the requests that wait in this queue."""
        return self._queue.queued_tokens

    @property
    def places(self) -> int:
        """Return how many requests the pool's available endpoints may run at the same time."""
        return self._queue.capacity

    def mean_service_s(self, now: float) -> float | None:
        """Return the mean seconds from a request's admission to its end; None while unknown.

        While the pool is full, this is its capacity divided by its throughput (Little's law).
        """
        rate = self._queue.full_rate(now)
        return self._queue.capacity / rate if rate else None

    @property
    def permits_in_use(self) -> int:
        """Return the number of admitted requests that are still running; each holds a permit.

        Requests at ejected or leaving endpoints are not counted.
        """
        return self._queue.busy_permits

    async def enter(
        self, query: RoutingQuery, query_at: Callable[[float], RoutingQuery] | None = None
    ) -> PoolQueue:
        """Wait until a request is admitted, and return this object as a context manager.

        The admitted request holds a permit until its `with` block on this object ends. Raises
        GatewayError if the request is rejected.

        query_at  function that returns the policy's input (the request and its cached tokens) at a
                  later time, because cached prefixes change during a wait; None: it stays the same
        """
        waiter: WaiterFuture = asyncio.get_running_loop().create_future()
        verdict = self._queue.arrive(query, self._candidates, waiter, query_at)
        self._settle()
        if isinstance(verdict, Wait):
            verdict = await self._wait(query.request, waiter, verdict.timeout_s)
        if isinstance(verdict, Shed):
            raise shed_error(verdict)
        return self

    async def enter_first(self) -> PoolQueue:
        """Admit a request before all waiting ones, without a decision by the admission policy.

        This is for batch requests on capacity that is reserved for their batch. The batch runner
        already limits their number.
        """
        if not self._first and self._queue.take_permit():
            return self
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._first.remove(waiter)
            else:  # the permit and the cancellation arrived together: pass the permit on
                self._queue.undo_admit()
                self._settle()
            raise
        return self

    def try_enter(self, query: RoutingQuery) -> bool:
        """Admit a request if no wait is necessary; return whether it was admitted.

        An admitted request holds a permit until the `with` block of this object ends.
        """
        return isinstance(self._queue.decide_without_queueing(query, self._candidates), Admit)

    def on_not_routed(self, request: Request) -> None:
        """Refund the tokens that a tenant was charged for a request that no endpoint could serve.

        A request that had to wait is charged when it is admitted, which is before an endpoint is
        picked.
        """
        self._queue.on_not_routed(request)

    async def _wait(self, request: Request, waiter: WaiterFuture, timeout_s: float) -> Verdict:
        # At the end of the timer, _settle() lets the queue refuse the waiter and delivers the
        # verdict.
        timer = asyncio.get_running_loop().call_later(timeout_s, self._settle)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and isinstance(waiter.result(), Admit):
                # The permit and the cancellation arrived together: pass the permit on.
                self._queue.undo_admit()
                self._settle()
            else:
                self._queue.cancel(waiter)
            self._queue.on_not_routed(request)
            raise
        finally:
            timer.cancel()

    def __enter__(self) -> PoolQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Take back the permit of an ended request, and admit waiting requests that now fit."""
        if self._queue.free_place(monotonic()) or self._first:
            self._settle()

    def _settle(self) -> None:
        for waiter in tuple(self._first):
            if waiter.cancelled():  # the task that waits is about to remove it
                continue
            if not self._queue.take_permit():
                break
            self._first.remove(waiter)
            waiter.set_result(None)
        is_scheduled = bool(self._verdicts)
        self._verdicts.extend(self._queue.take_verdicts(monotonic() + TIMER_SLACK_S))
        if not is_scheduled:
            self._deliver_verdicts()

    def _deliver_verdicts(self) -> None:
        # Deliver VERDICTS_PER_TURN verdicts now and the rest in later turns of the event loop.
        #
        # A hundred requests admitted in one turn would delay all running streams.
        delivered = 0
        # A loop and not a recursion: many waiters may be cancelled in the turn of their verdict.
        while self._verdicts and delivered < VERDICTS_PER_TURN:
            waiter, verdict = self._verdicts.popleft()
            if not waiter.done():
                waiter.set_result(verdict)
                delivered += 1
            elif isinstance(verdict, Admit):
                self._queue.undo_admit()
                self._verdicts.extend(self._queue.take_verdicts(monotonic() + TIMER_SLACK_S))
        if self._verdicts:
            self._verdicts[0][0].get_loop().call_soon(self._deliver_verdicts)


def shed_error(shed: Shed) -> GatewayError:
    """Return the client's error for a request that the admission policy has refused (shed)."""
    if shed.reason == "no_capacity":
        return GatewayError(Failure.NO_CAPACITY, shed.detail, retry_after_s=1.0)
    failure = SHED_FAILURES.get(shed.reason, Failure.SHED)
    return GatewayError(
        failure,
        shed.detail,
        retry_after_s=shed.retry_after_s,
        reason=shed.reason,
        may_return=shed.may_return,
    )

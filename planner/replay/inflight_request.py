"""The record of one request that is running in a replay: its group, reservation, job and leg."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mockgpu.scheduler import Job
from planner.replay.group_sim import ReplayGroup
from planner.replay.results import ReplayRecord
from planner.traces.recorded_request import TraceRequest
from policies.load_ledger import LoadReservation
from policies.prefix.fingerprint import Fingerprint
from policies.pricing.pull_decision import PullDecision
from policies.pricing.split_decision import EndpointPair
from policies.pricing.transfer_time import PendingTransfer
from policies.routing_types import Pick, Request


@dataclass(slots=True, eq=False)
class InflightRequest:
    """What a replay knows of one request between its arrival and its end.

    Only fleet_sim.py, admission_sim.py and disagg_sim.py change it. A group is a simulated
    endpoint, and a job is the request's work there.

    record            what is recorded about the request
    trace_request     the request in the trace
    request           the request as policies see it
    keys              chained ids of the prompt's complete blocks
    fingerprint       the prompt's fingerprint; None: the policy reads no prefixes
    next_requests     the following requests of its client, in a closed loop
    has_permit        whether it has a permit to run, from the wait queue
    has_ended         whether its result is final
    failed_endpoints  names of groups on which it has failed
    group             the group that serves it; None: it waits
    job               its job there
    reservation       its reserved load there
    first_pick        the first pick of a group for it; None: it was not sent, or it was split
    first_cached      prompt tokens that each group was believed to have cached then, by slot
    believed_tokens   prompt tokens that its group was believed to have cached at the pick
    ahead_tokens      prompt tokens that its group had to compute when it was sent, including its
                      own
    sent_s            time at which it was sent
    is_expected       whether its block ids count as blocks that its group will compute soon
    race              the other attempt at the same request, while there are two
    is_hedge          whether this is the second attempt
    pull              the fetch of its prompt's beginning that the gateway decided
    pulled_from       the other group that sends it; None: no other group does
    is_overtaken      whether its group's speed samples no longer wait for its first token

    For a split request:

    decode_group         the group that decodes it
    prefill_group        the group that computes its prompt; None: its KV was already fetched or
                         lost
    prefill_job          the job there, whose blocks are kept until they are fetched
    prefill_reservation  its reserved load there
    pair                 both endpoints
    transfer             the transfer of its KV, as the gateway forecasts it
    prefilled_s          when the prompt was computed
    """

    record: ReplayRecord
    trace_request: TraceRequest
    request: Request
    keys: tuple[int, ...]
    fingerprint: Fingerprint | None
    next_requests: Iterator[TraceRequest] | None = None
    has_permit: bool = False
    has_ended: bool = False
    failed_endpoints: frozenset[str] = frozenset()
    group: ReplayGroup | None = None
    job: Job | None = None
    reservation: LoadReservation | None = None
    first_pick: Pick | None = None
    first_cached: Sequence[int] = ()
    believed_tokens: int = 0
    ahead_tokens: int = 0
    sent_s: float = 0.0
    is_expected: bool = False
    race: InflightRequest | None = None
    is_hedge: bool = False
    is_overtaken: bool = False
    pull: PullDecision | None = None
    pulled_from: ReplayGroup | None = None
    decode_group: ReplayGroup | None = None
    prefill_group: ReplayGroup | None = None
    prefill_job: Job | None = None
    prefill_reservation: LoadReservation | None = None
    pair: EndpointPair | None = None
    transfer: PendingTransfer | None = None
    prefilled_s: float | None = None

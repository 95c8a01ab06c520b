"""One running request of a replay: where it is, and what must be given back when it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mockgpu.job import Job
from planner.replay.group import Group
from planner.replay.record import Record
from planner.traces.shape import TraceRequest
from policies.ledger import Entry
from policies.model import Request
from policies.prefix.fingerprint import Fingerprint


@dataclass(slots=True, eq=False)
class Flight:
    """A request between its arrival and its end.

    Changed by fleet.py, admission_sim.py and disagg_sim.py only.

    rest      the following requests of its client, in a closed loop
    permit    it holds a place of its pool's wait queue
    believed  prompt tokens that its group was believed to have cached at the pick
    ahead_tokens, sent_s  prompt tokens its group had to compute, including its own, when it was
                          sent; and that time
    expected  its keys are counted among those its group is about to compute
    race      the other attempt at the same request, while there are two; `is_hedge`: this is the
              second one
    is_overtaken  its group's evidence of speed no longer waits for its first token

    For a split request:
    taker     the group that decodes it
    giver     the group that computes its prompt; None once its KV was fetched or lost
    given     the job there, whose blocks are kept until they were fetched
    prefill_entry  the booking there
    """

    record: Record
    one: TraceRequest
    request: Request
    keys: tuple[int, ...]
    fingerprint: Fingerprint | None
    rest: Iterator[TraceRequest] | None = None
    permit: bool = False
    over: bool = False
    tried: frozenset[str] = frozenset()
    group: Group | None = None
    job: Job | None = None
    entry: Entry | None = None
    believed: int = 0
    ahead_tokens: int = 0
    sent_s: float = 0.0
    expected: bool = False
    race: Flight | None = None
    is_hedge: bool = False
    is_overtaken: bool = False
    taker: Group | None = None
    giver: Group | None = None
    given: Job | None = None
    prefill_entry: Entry | None = None

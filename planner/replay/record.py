"""The records of a replay: one per request, per group and per run; results.py evaluates them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from policies.routing_types import Slo


class RequestEnd(StrEnum):
    """The ways in which a request of a replay can end.

    Every request ends in exactly one of them.
    """

    SERVED = "served"
    SHED = "shed"  # refused, and its client did not retry
    LOST = "lost"  # its group died during its answer, or no group could serve it
    LEFT = "left"  # its client gave up
    CUT = "cut"  # the replay ended first


@dataclass(slots=True)
class ReplayRecord:
    """One request of a replay, as its client saw it.

    Times are on the replay's clock; None: the event did not occur.

    number            number of the request, in order of arrival
    arrived_s         time at which the client first sent the request
    prompt_tokens     tokens of its prompt
    output_tokens     tokens of its answer
    slo               its service class
    tenant            its tenant
    session           key of its session; "": none
    entered_s         time at which the request was admitted and a group was picked
    group             name of the group that served the request
    prefilled_by      name of the prefill group of a split request
    cached_tokens     prompt tokens that the engine had cached
    believed_tokens   prompt tokens that the gateway expected to be cached
    ideal_tokens      prompt tokens that would be cached if all groups shared one cache without
                      evictions
    predicted_ttft_s  seconds to the first token that were predicted at the pick
    predicted_tpot_s  seconds per further token that were predicted at the pick
    first_s           time of the first token
    done_s            time of the last token
    longest_gap_s     longest time between two tokens in seconds
    wasted_tokens     prompt tokens that were computed in vain
    preemptions       how often an engine interrupted the request because KV memory was full
    refusals          how often the request was refused
    refused_s         time of the first refusal
    promised_s        time at which the client may retry, by the first Retry-After
    retries           number of further attempts after a group had failed
    end               how the request ended
    reason            reason of a refusal or failure
    """

    number: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    tenant: str = ""
    session: str = ""
    entered_s: float | None = None
    group: str = ""
    prefilled_by: str = ""
    believed_tokens: int = 0
    cached_tokens: int = 0
    ideal_tokens: int = 0
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    first_s: float | None = None
    done_s: float | None = None
    longest_gap_s: float = 0.0
    wasted_tokens: int = 0
    preemptions: int = 0
    refusals: int = 0
    refused_s: float | None = None
    promised_s: float | None = None
    retries: int = 0
    end: RequestEnd = RequestEnd.CUT
    reason: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Return the seconds from the first attempt to the first token; None: no token came."""
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean seconds per token after the first one.

        Returns None for an incomplete answer, or one of a single token.
        """
        if self.first_s is None or self.done_s is None or self.output_tokens < 2:
            return None
        return (self.done_s - self.first_s) / (self.output_tokens - 1)

    @property
    def is_good(self) -> bool:
        """Return whether the request was served within the latency budgets of its service class."""
        ttft_s, tpot_s = self.ttft_s, self.tpot_s
        if self.end is not RequestEnd.SERVED or ttft_s is None:
            return False
        return ttft_s <= self.slo.ttft_s and (tpot_s is None or tpot_s <= self.slo.tpot_s)


@dataclass(slots=True)
class GroupTotals:
    """The totals of one simulated group.

    name           name of the group
    prompt_tokens  prompt tokens of its requests
    cached_tokens  number of these tokens that were cached
    output_tokens  generated tokens
    requests       number of requests
    steps          number of engine steps
    busy_s         seconds spent in steps
    """

    name: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    steps: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class ReplayRun:
    """The outcome of one replay.

    policy   name of the routing policy
    fleet    name of the fleet
    records  the requests in order of arrival
    groups   the totals of each group
    ended_s  clock at the last event
    picks    number of decisions of the policy
    pick_s   wall time of these decisions in seconds
    wall_s   wall time of the whole replay in seconds
    """

    policy: str
    fleet: str
    records: list[ReplayRecord]
    groups: list[GroupTotals] = field(default_factory=list)
    ended_s: float = 0.0
    picks: int = 0
    pick_s: float = 0.0
    wall_s: float = 0.0

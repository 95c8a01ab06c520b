"""The data of one endpoint's live load, without code: reserved requests, scraped metrics, limits.

This module contains only the mutable state. load_ledger.py changes the reserved numbers. The
gateway's health checks and drains change the availability.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from policies.engine.engine_load import EngineLoad
from policies.engine.engine_model_updates import EngineTimeline
from policies.engine.output_length import RecentLengths
from policies.engine.step_time import SpeedBelief

NO_SOFT_CAP = 1 << 30

CHANGES = 4096
"""Number of changes that a LoadChanges keeps; a power of two."""


class LoadChanges:
    """Records which endpoints' loads have changed, so that readers need not look at all endpoints.

    It is a ring buffer of slots (small integers that identify endpoints), for any number of
    readers. A reader remembers how many changes it has read. A reader that is more than CHANGES
    behind has missed some, and must read every load.

    count  number of changes so far; change `n` is in `slots[n % CHANGES]`
    """

    __slots__ = ("count", "slots")

    def __init__(self) -> None:
        self.count = 0
        self.slots = [0] * CHANGES

    def record(self, slot: int) -> None:
        count = self.count
        self.slots[count & (CHANGES - 1)] = slot
        self.count = count + 1

    def since(self, count: int) -> list[int] | None:
        """Return the slots of endpoints whose load changed after the first `count` changes.

        Returns None if some of these changes were overwritten. The reader must then read every
        load.
        """
        behind = self.count - count
        if behind > CHANGES:
            return None
        begin, end = count & (CHANGES - 1), self.count & (CHANGES - 1)
        if begin <= end and behind < CHANGES:
            return self.slots[begin:end]
        return self.slots[begin:] + self.slots[:end]


class EndpointLoad(EngineLoad):
    """The changing state of one endpoint that policies read.

    A reserved request is one that was sent to the endpoint and has not ended.

    slot                  small integer that identifies the endpoint in this process: its index in
                          RoutingQuery.cached_by_slot and in the prefix index
    in_flight             number of reserved requests
    decoding              reserved requests whose first token has come
    prefill_tokens        uncached prompt tokens of reserved requests whose first token has not come
    decode_tokens         prompt tokens of reserved requests whose first token has come
    prefix_cache_tokens   prompt tokens that its prefix cache is believed to hold, over all requests
    eviction_regret       fraction (0 to 1) of evicted prefix blocks that were requested again while
                          no endpoint had them
    kv_reserved           KV that reserved requests use or will use: their prompt plus expected
                          output tokens
    is_available          False while health checks have ejected it, or while it drains. It gets no
                          requests then
    is_proven             whether its last result was a success, or it had no failure yet; retries
                          prefer such endpoints
    soft_cap              maximum number of concurrent requests while other endpoints have capacity;
                          below the cap during slow start (slow_start.py)
    running               requests that the engine ran at the last scrape
    waiting               requests that waited in the engine at the last scrape
    kv_usage              fraction of the engine's KV in use at the last scrape, 0 to 1
    scraped_at            time of the last scrape on the policy clock
    unexplained_requests  how many more requests the engine had than `in_flight` at the last scrape
    is_modelled           whether any policy reads the forecast; if not, `timeline` is not updated
    timeline              the simulated engine, which makes the forecast (engine_model_updates.py)
    lockstep_ranks        the loads of all data-parallel ranks of its engine, this one included, if
                          their steps begin and end together (join_ranks); else empty
    changes               the log of changed loads, which rankings read; None: no ranking reads it

    The values of the last scrape are None before the first one.
    """

    __slots__ = (
        *(
            "is_available",
            "is_modelled",
            "unexplained_requests",
            "soft_cap",
            "decode_tokens",
            "decoding",
            "prefix_cache_tokens",
            "in_flight",
        ),
        *(
            "is_proven",
            "kv_reserved",
            "kv_usage",
            "prefill_tokens",
            "eviction_regret",
            "running",
            "scraped_at",
            "slot",
        ),
        *("changes", "lockstep_ranks", "timeline", "waiting"),
    )

    def __init__(
        self,
        slot: int,
        belief: SpeedBelief | None = None,
        lengths: RecentLengths | None = None,
    ) -> None:
        # lengths  the lengths of answers that all endpoints of a pool have learned together
        super().__init__(belief)
        self.slot = slot
        self.in_flight = self.decoding = self.prefill_tokens = self.decode_tokens = (
            self.kv_reserved
        ) = 0
        self.prefix_cache_tokens = self.eviction_regret = 0.0
        self.is_available = self.is_proven = True
        self.soft_cap = NO_SOFT_CAP
        self.running: int | None = None
        self.waiting: int | None = None
        self.kv_usage: float | None = None
        self.scraped_at: float | None = None
        self.unexplained_requests = 0
        self.timeline = EngineTimeline(0.0, lengths)
        self.is_modelled = True
        self.changes: LoadChanges | None = None
        self.lockstep_ranks: tuple[EndpointLoad, ...] = ()
        self.timeline.refresh_forecast(self, 0.0)

    def mark_changed(self) -> None:
        """Tell readers that this load has changed in a value that filters or scorers use."""
        self.timeline.answers_due_at = -inf
        if self.changes is not None:
            self.changes.record(self.slot)

    def copy_values(self, other: EndpointLoad) -> None:
        """Take over another load's values of this class, except `changes` and `timeline`."""
        self.slot = other.slot
        self.in_flight = other.in_flight
        self.decoding = other.decoding
        self.prefill_tokens = other.prefill_tokens
        self.decode_tokens = other.decode_tokens
        self.kv_reserved = other.kv_reserved
        self.prefix_cache_tokens = other.prefix_cache_tokens
        self.eviction_regret = other.eviction_regret
        self.is_available = other.is_available
        self.is_proven = other.is_proven
        self.soft_cap = other.soft_cap
        self.running = other.running
        self.waiting = other.waiting
        self.kv_usage = other.kv_usage
        self.scraped_at = other.scraped_at
        self.unexplained_requests = other.unexplained_requests
        self.is_modelled = other.is_modelled
        self.lockstep_ranks = other.lockstep_ranks


def join_ranks(loads: Sequence[EndpointLoad]) -> None:
    """Declare that these are the data-parallel ranks of one engine, which step together.

    In this engine, each rank waits for the slowest one. The ranks then share one learned speed. A
    list of one rank means that this rank steps alone. An earlier declaration for the same loads is
    replaced.
    """
    ranks = tuple(loads) if len(loads) > 1 else ()
    for load in loads:
        load.belief, load.lockstep_ranks = loads[0].belief, ranks


LOAD_FIELDS = (*EngineLoad.__slots__, *EndpointLoad.__slots__)
"""The names of all attributes of an EndpointLoad, with those of its base class."""

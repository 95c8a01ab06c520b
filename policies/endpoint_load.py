"""The live load of one endpoint: reserved and scraped numbers, flags, learned speed and forecast.

The module contains mutable state only. load_ledger.py changes the reserved numbers; the gateway's
health checks and drains change the availability.
"""

from __future__ import annotations

from math import inf

from policies.engine.engine_load import EngineLoad
from policies.engine.engine_timeline import EngineTimeline
from policies.engine.output_length import RecentLengths
from policies.engine.step_time import SpeedBelief

NO_SOFT_CAP = 1 << 30

CHANGES = 4096
"""Number of changes that a LoadChanges keeps; a power of two."""


class LoadChanges:
    """A ring buffer of the endpoints whose loads have changed, for any number of readers.

    An endpoint is represented by its slot, a small integer (EndpointLoad). A reader stores the
    count up to which it has read. A reader that is more than CHANGES behind has missed changes and
    must read every load.

    count  changes so far; change n is in slots[n % CHANGES]
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

        Returns None if some of these changes were overwritten.
        """
        behind = self.count - count
        if behind > CHANGES:
            return None
        begin, end = count & (CHANGES - 1), self.count & (CHANGES - 1)
        if begin <= end and behind < CHANGES:
            return self.slots[begin:end]
        return self.slots[begin:] + self.slots[:end]


class EndpointLoad(EngineLoad):
    """Everything that changes about an endpoint and that policies read.

    A reserved request is one that was sent to the endpoint and has not ended.

    slot                  small integer that identifies the endpoint in this process: its index in
                          RoutingQuery.cached_by_slot and in the prefix index
    in_flight             number of reserved requests
    decoding              reserved requests whose first token has come
    prefill_tokens        uncached prompt tokens of reserved requests whose first token has not come
    decode_tokens         prompt tokens of reserved requests whose first token has come
    prefix_cache_tokens   prompt tokens that its prefix cache is believed to hold, over all requests
    eviction_regret       share of evicted prefix blocks that were requested again while no endpoint
                          had them, 0 to 1
    kv_reserved           prompt plus expected output tokens of all reserved requests: KV they use
                          or will use
    is_available          False while ejected by health checks or draining: never a candidate then
    is_proven             no failure yet, or a success after the last one; retries prefer such
                          endpoints
    soft_cap              maximum number of concurrent requests while other endpoints have capacity;
                          below the cap during slow start (slow_start.py)
    running               requests that the engine ran at the last scrape
    waiting               requests that waited in the engine at the last scrape
    kv_usage              share of the engine's KV in use at the last scrape, 0 to 1
    scraped_at            time of the last scrape on the policy clock
    unexplained_requests  by how many requests the engine's metrics exceeded `in_flight` at the last
                          scrape
    is_modelled           whether any policy reads the forecast; if none does, the timeline does not
                          advance
    timeline              the engine model (engine_timeline.py)
    changes               where changes of this load are recorded for rankings of candidates; None
                          while no ranking reads them

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
        *("changes", "timeline", "waiting"),
    )

    def __init__(
        self,
        slot: int,
        belief: SpeedBelief | None = None,
        lengths: RecentLengths | None = None,
    ) -> None:
        # `lengths` is what the endpoints of a pool have learned of the lengths of answers.
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
        self.timeline.refresh_forecast(self, 0.0)

    def mark_changed(self) -> None:
        """Record that a value of this load has changed that filters or scorers read."""
        self.timeline.answers_due_at = -inf
        if self.changes is not None:
            self.changes.record(self.slot)


LOAD_FIELDS = (*EngineLoad.__slots__, *EndpointLoad.__slots__)
"""The names of all attributes of an EndpointLoad, with those of its base class."""
